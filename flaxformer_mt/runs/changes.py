"""How the options of a run were changed in its course: the history in its `config.json`.

Each entry has the `step` of the checkpoint after which a change took effect, the values of the
changed `options` before and after it, and new fingerprints of the `corpora` whose text changed. The
steps after an entry were made with the values of all entries up to it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from flaxformer_mt import config as configuration
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.serialization import HISTORY
from flaxformer_mt.input_files import Count, read_json
from flaxformer_mt.run_layout import CONFIG, METRICS
from flaxformer_mt.runs.metrics_file import read_lines

SPLIT = "change"
"""The split of the line of `metrics.jsonl` about a change."""


class _Change(TypedDict):
    step: Count
    options: dict[str, tuple[Any, Any]]
    corpora: dict[str, list[str]]


class _Config(TypedDict, total=False):
    history: list[_Change]


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Reads the history of a run, oldest first."""
    values: dict[str, Any] = read_json(Path(folder, CONFIG), _Config)
    return values.get(HISTORY, [])


def before(config: ExperimentConfig, history: Sequence[Mapping[str, Any]]) -> ExperimentConfig:
    """Returns the configuration of a run before the last entries of its history."""
    values = configuration.to_dict(config)
    for entry in reversed(history):
        for name, (old, _) in entry["options"].items():
            group, _, field = name.partition(".")
            values.setdefault(group, {})[field] = old
    return configuration.from_dict(values)


def described(entry: Mapping[str, Any]) -> str:
    """Returns an entry in words: "optimizer.learning_rate: 0.001 -> 0.0005; train text"."""
    options = (
        f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
        for name, (old, new) in entry["options"].items()
    )
    return "; ".join([*options, *(f"text of {split}" for split in entry["corpora"])])


def missing_lines(
    folder: Path, history: Sequence[Mapping[str, Any]], last: int
) -> list[tuple[int, dict[str, str]]]:
    """Returns the steps and values of the lines about changes that `metrics.jsonl` lacks.

    `last` is the step that the run continues from; lines of later ones are removed.
    """
    lines = [line.values for line in read_lines(folder / METRICS) if line.values is not None]
    written = [line for line in lines if line["split"] == SPLIT and line["step"] <= last]
    return [(entry["step"], {"changed": described(entry)}) for entry in history[len(written) :]]
