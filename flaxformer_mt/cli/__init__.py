"""The console script `flaxformer-mt`.

`program` dispatches to the commands, which are functions in `translate`, `evaluate`, `checkpoints`,
`corpora`, `configs`, `doctor`, `convert`, `serve` and `parity`: their arguments are the options,
their docstrings the help.
`training` holds the command `train`, which is also the program `train.py`.
`options` and `output` hold what several commands share; `help_text` formats the help;
`unknown_options` has the names that other programs have for ours.
"""

from flaxformer_mt.cli.entry_points import main

__all__ = ["main"]
