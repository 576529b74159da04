"""The console of a run."""

from typing import TextIO, cast

from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.standard_output import BestEffortOutput


def make_console(file: BestEffortOutput | None = None) -> Console:
    """Returns a console for the progress of a run; quiet in all processes but the first.

    Args:
      file: to print to; by default standard output.
    """
    return Console(
        file=cast(TextIO, file),
        highlight=False,
        markup=False,
        soft_wrap=True,
        quiet=not distributed.is_main(),
    )
