"""Entry points of the programs: `flaxformer-mt` and `train.py`.

They handle signals before they import anything that takes time.
"""

import sys
from collections.abc import Sequence

from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.interruption import Interruption, run_interruptibly


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command given by `arguments`, by default those of the process.

    Returns:
      The exit code.

    Raises:
      SystemExit: with code 2 for invalid options, with code 0 after `--help`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        return train(given[1:], "flaxformer-mt train", until_exit=arguments is None)
    try:
        from flaxformer_mt.cli.program import run

        return run(given)
    except KeyboardInterrupt:
        return ExitCode.STOPPED


def train(arguments: Sequence[str], program: str = "train.py", until_exit: bool = False) -> int:
    """Trains an experiment.

    Args:
      arguments: the command line after the program's name.
      program: the program's name, for help and messages.
      until_exit: see `Interruption`.

    Returns:
      The exit code.

    Raises:
      SystemExit: with code 2 for invalid options, with code 0 after `--help`.
    """

    def start(interruption: Interruption) -> int:
        from flaxformer_mt.cli.training import run

        return run(arguments, program, interruption)

    return run_interruptibly(program, start, until_exit)
