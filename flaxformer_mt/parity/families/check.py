"""Compares a family with its reference, with random weights or those of a checkpoint."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import host_memory, require_memory
from flaxformer_mt.parity import references
from flaxformer_mt.parity.families import published
from flaxformer_mt.parity.families.compare import compare
from flaxformer_mt.parity.families.model_pair import Tables
from flaxformer_mt.parity.families.published import Dtype, PublishedModel
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.families.saved_values import SavedValues, compare_saved, script
from flaxformer_mt.parity.families.tokens import check_special_tokens, example
from flaxformer_mt.parity.reports.comparison import SettingDifference
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.presets import FAMILIES, canonical_family, check_fields, preset

Size = Literal["toy", "base"]

SIZES: dict[Size, dict[str, int]] = {
    # Sizes are distinct where possible, so that swapped axes are detected.
    "toy": {
        "source_vocab_size": 13,
        "target_vocab_size": 11,
        "d_model": 16,
        "num_heads": 4,
        "d_ff": 24,
        "num_encoder_layers": 3,
        "num_decoder_layers": 2,
    },
    # The other sizes are those of the preset, usually D 512, F 2048, H 8 and 6 + 6 layers.
    "base": {"source_vocab_size": 4001, "target_vocab_size": 3989},
}

# Heads whose width is not D / H.
_T5_HEADS = {
    # Within the toy sentences, distances reach every kind of bucket.
    "head_dim": 5,
    "relative_position_buckets": 8,
    "relative_position_max_distance": 5,
}
_TOY_HEADS = {
    "jadore801120": {"head_dim": 5, "value_dim": 3},
    "annotated_wide_heads": {"head_dim": 5, "value_dim": 5},
    "t5": _T5_HEADS,
    "umt5": _T5_HEADS,
    # The toy sentences are longer than the window.
    "t5gemma": {"head_dim": 6, "num_kv_heads": 2, "attention_window": 4},
}
_DTYPES = ("dtype", "param_dtype")
_SOURCE_LENGTH, _TARGET_LENGTH = 11, 9
# Enough not to be memorized within some hundred steps: a loss near 0 is dominated by rounding.
_BATCHES = 32


def check_family(
    family: str,
    *,
    dtype: Dtype = "float64",
    size: Size = "toy",
    num_steps: int = 0,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    saved: SavedValues | None = None,
    tables: Tables | None = None,
    **settings: Any,
) -> Report:
    """Compares our model with the reference of a family, on generated sentences with padding.

    Arguments are the options of the command `parity`; `saved` is what another program computed
    with the checkpoint, and `settings` are fields of `TransformerConfig` that override the size or
    the checkpoint. Raises UserError if the family, a setting or the checkpoint is invalid.
    """
    family = canonical_family(family)
    if family not in FAMILIES:
        raise UserError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    check_fields(settings)
    for name, value in {"num_steps": num_steps, "seed": seed}.items():
        if value < 0:
            raise UserError(f"{name}={value} must not be negative")
    notes: list[str] = []
    contradicted: tuple[SettingDifference, ...] = ()
    if checkpoint is None:
        config, module = random_reference(family, dtype, size, seed, **settings)
    else:
        model = published.read(family, checkpoint)
        if saved is not None:
            return compare_saved(model, saved, settings, tables or "published")
        config = model.configure(settings)
        check_special_tokens(config)
        module = model.reference(config, dtype, tables or "exact")
        contradicted = _contradicted(model.stated(), settings)
        notes = _reservation(model, config, settings, tables or "exact")
    batches = [
        example(
            config,
            source_length=min(_SOURCE_LENGTH, config.max_length),
            target_length=min(_TARGET_LENGTH, config.max_length),
            source_padding=recipe(family).source_padding,
            seed=seed + number,
        )
        for number in range(_BATCHES)
    ]
    # All of it, since the module's tensors do not have what a file says of itself.
    told = {n: v for n, v in dataclasses.asdict(config).items() if n not in _DTYPES}
    report = compare(
        family,
        module,
        batches[0],
        num_steps=num_steps,
        batches=batches,
        tables=tables or "exact",
        **told,
    )
    return dataclasses.replace(
        report, settings=contradicted + report.settings, notes=(*notes, *report.notes)
    )


def saving_script(family: str, checkpoint: str | os.PathLike[str] | None, **settings: Any) -> str:
    """Returns a script that saves the values of another program."""
    family = canonical_family(family)
    if checkpoint is None:
        config, _ = random_reference(family, "float32", "toy", 0, **settings)
    else:
        config = published.read(family, checkpoint).configure(settings)
    if not config.target_vocab_size:
        raise UserError(f"{family} has no embeddings: there are no tokens to save values for")
    return script(family, config)


def _contradicted(
    stated: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[SettingDifference, ...]:
    return tuple(
        SettingDifference(name, ours, stated[name], "the checkpoint's own settings")
        for name, ours in given.items()
        if name in stated and stated[name] != ours
    )


def _reservation(
    model: PublishedModel,
    config: TransformerConfig,
    given: Mapping[str, Any],
    tables: Tables,
) -> list[str]:
    stated = model.stated()
    names = sorted({"num_heads", "pad_id", "bos_id", "eos_id"} | model.family.open_switches)
    assumed = [name for name in names if name not in stated and name not in given]
    sources = {
        "stated by the checkpoint": [name for name in names if name in stated],
        "given": sorted(given),
        "read from its tensors or assumed as published": assumed,
    }
    settings = "; ".join(
        f"{source}: {', '.join(f'{name}={getattr(config, name)}' for name in found)}"
        for source, found in sources.items()
        if found
    )
    notes = [
        "The reference was built from the same settings as our model: wrong settings would agree. "
        "To test them, compare with values that the original program saved (--script prints how).",
        f"Settings {settings}.",
    ]
    if tables == "exact" and any(each.exact for each in model.family.buffers(config)):
        notes.append("Published tables of positions are replaced by exact ones on both sides.")
    return notes


def random_reference(
    family: str, dtype: Dtype, size: Size, seed: int, **settings: Any
) -> tuple[TransformerConfig, nn.Module]:
    """Returns the configuration and the reference of a family with random weights."""
    family = canonical_family(family)
    sizes: dict[str, Any] = {**SIZES[size], **settings}
    if size == "toy":
        sizes = _TOY_HEADS.get(family, {}) | sizes
    if "source_vocab_size" not in settings and _needs_one_vocabulary(family, settings):
        sizes["source_vocab_size"] = sizes["target_vocab_size"]
    given = preset(family, **sizes)
    check_special_tokens(given)
    count = given.parameter_count
    require_memory(
        4 * count * np.dtype(dtype).itemsize,  # Both sides, and their gradients.
        host_memory(),
        f"comparing two models of {count:,} parameters takes",
    )
    # The weight map provides the published special tokens.
    told = {"num_heads": given.num_heads} | settings
    config, _ = interop.load(
        family, references.of_config(family, given, dtype).state_dict(), **told
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return config, references.perturb(references.of_config(family, config, dtype)).eval()


def _needs_one_vocabulary(family: str, settings: Mapping[str, Any]) -> bool:
    names = ("has_inputs", "tie_embeddings")
    chosen = {name: settings[name] for name in names if name in settings}
    return preset(family, **chosen).shares_source_and_target
