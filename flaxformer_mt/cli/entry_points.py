"""Entry points of the programs: `flaxformer-mt` and `train.py`.

They handle signals before they import anything that takes time, and report errors in one line.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

from flaxformer_mt.errors import UserError, first_line, shown, unusable
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.interruption import Interruption, run_interruptibly
from flaxformer_mt.standard_output import discard_output

PROGRAM = "flaxformer-mt"
"""Name of the console script."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command given by `arguments`, by default those of the process.

    Returns the exit code; SystemExit, with code 2 for invalid options, with code 0 after `--help`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:
        return train(given[1:], f"{PROGRAM} train", until_exit=arguments is None)

    def start() -> int:
        from flaxformer_mt.cli.program import run

        return run(given)

    # A comparison that is impossible is not one that found a difference.
    failure = ExitCode.USAGE if given[:1] == ["parity"] else ExitCode.FAILURE
    try:
        return _reported(PROGRAM, start, failure)
    except KeyboardInterrupt:
        return ExitCode.STOPPED


def train(arguments: Sequence[str], program: str = "train.py", until_exit: bool = False) -> int:
    """Trains an experiment, as `main`; `program` is named in messages.

    For `until_exit` see `Interruption`.
    """

    def start(interruption: Interruption) -> int:
        from flaxformer_mt.cli.training import run

        run(arguments, program, interruption)
        return ExitCode.SUCCESS

    return _reported(program, lambda: run_interruptibly(program, start, until_exit))


def _reported(
    program: str, command: Callable[[], int], failure: ExitCode = ExitCode.FAILURE
) -> int:
    """Returns the exit code of a command, or `failure` after an error reported in one line.

    If the reader of standard output is gone, it is FAILURE, without a message.
    """
    _open_standard_streams()
    try:
        try:
            return command()
        finally:
            # While errors can still be reported; Python flushes once more at exit.
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return ExitCode.FAILURE
    except UserError as error:
        message = str(error)
    except MemoryError as error:
        message = f"the memory of this process is exhausted ({first_line(error)})"
    except OSError as error:
        message = str(unusable(error))
        # Errors of files have their names.
        if error.filename is None and error.errno in _WRITE_ERRORS:
            discard_output()
            message = f"standard output cannot be written: {message}"
    print(f"{program}: error: {shown(message)}", file=sys.stderr)
    return failure


_WRITE_ERRORS = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}


def _open_standard_streams() -> None:
    """Opens streams that are closed, so that no other file takes their place.

    Using them is an error, except for standard error. Characters that standard output cannot encode
    are written as escapes.
    """
    for name, flags, mode in (
        ("stdin", os.O_WRONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
