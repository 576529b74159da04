"""The layout of a run folder: the names of its files and folders."""

from typing import Literal, TypeAlias

CheckpointSelector: TypeAlias = Literal["best", "last"] | int
"""Selects a checkpoint: the best by validation, the newest, or that of a step."""

CONFIG = "config.json"
"""The configuration as it was given; its presence marks a run folder."""
DATA = "data.json"
"""Fingerprints of the text and of the vocabulary."""
TOKENIZER = "tokenizer"
"""Folder of the vocabulary."""
METRICS = "metrics.jsonl"
"""One JSON object per line, with `step`, `split` and metrics."""
TENSORBOARD = "tensorboard"
"""Folder of the same metrics as event files."""
TRACKERS = "trackers"
"""Folder of the files of other experiment trackers."""
PROFILE = "profile"
"""Folder of traces, one folder per range of steps; may be deleted."""
CACHE = "cache"
"""Folder of the tokenized training text; may be deleted."""
LOCK = "lock"
"""Locked by the process that trains."""
PUBLICATION = "publication.json"
"""Identifies a run that was published to an object store."""
ORIGIN = "origin"
"""Folder of files of a published model that was converted, for converting it back."""
AVERAGED = "averaged"
"""Default name, in a run folder, of the run folder made of averaged checkpoints."""

CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, one folder per step, with these in each:"""
PARAMS = "params"
"""Orbax item: the parameters."""
EMA = "ema"
"""Orbax item: their moving average, if the run keeps one."""
TRAINING = "training"
"""Orbax item: the rest of the training state."""
PROGRESS = "progress.json"
"""Validation metric and position of the training loop."""
MANIFEST = "manifest.json"
"""Size and SHA-256 of every other file; written last."""

CONTENT = frozenset({
    CONFIG, DATA, TOKENIZER, METRICS, TENSORBOARD, TRACKERS, CACHE, LOCK, ORIGIN, PUBLICATION,
    CHECKPOINTS,
})  # fmt: skip
"""What a command must not write its output to."""
