"""Which changes of a configuration allow a run to be continued."""

import dataclasses
from typing import Any

from flaxformer_mt.config.decode import DecodeConfig
from flaxformer_mt.config.experiment import ExperimentConfig
from flaxformer_mt.config.serialization import to_dict

# A run may be continued with other values of these: no parameter depends on them.
RESUMABLE_FIELDS = (
    "data.path", "train.num_steps", "train.log_every", "train.eval_every", "train.eval_sentences",
    "train.checkpoint_every", "train.keep_last", "train.keep_best", "train.show_translations",
    "train.early_stopping_patience", "train.max_skipped_steps", "train.init_from", "model.remat",
    "parallel.strategy", "parallel.num_devices", "parallel.fsdp", "parallel.tensor",
    "parallel.sharding_rules",
    *(f"decode.{field.name}" for field in dataclasses.fields(DecodeConfig)),
)  # fmt: skip


def differences(stored: ExperimentConfig, given: ExperimentConfig) -> list[str]:
    """The fields that forbid continuing a run of `stored` with `given`.

    Returns:
      One string a field, "model.d_model: 128 in the run, 256 now".
    """
    resumable = set(RESUMABLE_FIELDS)
    if stored.optimizer.schedule == "one_cycle" and not stored.optimizer.total_steps:
        resumable.remove("train.num_steps")  # The rate of every step depends on it.
    ours, theirs = _without_paths(to_dict(stored)), _without_paths(to_dict(given))
    return [
        f"{group}.{name}: {value} in the run, {theirs[group][name]} now"
        for group, values in ours.items()
        for name, value in values.items()
        if value != theirs[group][name] and f"{group}.{name}" not in resumable
    ]


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The experiment without the places of its corpora, which may have moved."""
    for corpora in ("train_corpora", "valid_corpora", "test_corpora"):
        for corpus in values["data"][corpora]:
            del corpus["path"]
    return values
