"""Compares a family with its reference, with random weights or those of a checkpoint."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files, convert
from flaxformer_mt.interop.checkpoint_files import Tensors
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.memory_limits import host_memory, require_memory
from flaxformer_mt.parity import references
from flaxformer_mt.parity.compare import compare
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.tokens import check_special_tokens, example
from flaxformer_mt.presets import FAMILIES, canonical_family, check_fields, preset

Dtype = Literal["float64", "float32"]
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
"""Sizes of references with random weights."""

# Heads whose width is not D / H.
_TOY_HEADS = {
    "jadore801120": {"head_dim": 5, "value_dim": 3},
    "annotated_wide_heads": {"head_dim": 5, "value_dim": 5},
    # Within the toy sentences, distances reach every kind of bucket.
    "t5": {
        "head_dim": 5,
        "relative_position_buckets": 8,
        "relative_position_max_distance": 5,
    },
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
    **settings: Any,
) -> Report:
    """Compares our model with the reference of a family, on generated sentences with padding.

    Args:
      family: a key of `presets.FAMILIES`.
      dtype: the dtype of both sides.
      size: the size of a reference with random weights; biases and norms are perturbed, too.
      num_steps: optimizer steps to compare, by the family's recipe.
      seed: seed of the weights and the sentences.
      checkpoint: a file or folder with the weights (and sizes) of the reference; by default random
        weights.
      **settings: fields of `TransformerConfig` that override the size, or that the checkpoint does
        not determine.

    Raises:
      UserError: the family, a setting or the checkpoint is invalid.
    """
    family = canonical_family(family)
    if family not in FAMILIES:
        raise UserError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    check_fields(settings)
    for name, value in {"num_steps": num_steps, "seed": seed}.items():
        if value < 0:
            raise UserError(f"{name}={value} must not be negative")
    if checkpoint is None:
        config, module = random_reference(family, dtype, size, seed, **settings)
    else:
        config, module = load_reference(family, checkpoint, dtype, **settings)
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
    told = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _DTYPES
    }
    return compare(family, module, batches[0], num_steps=num_steps, batches=batches, **told)


def random_reference(
    family: str, dtype: Dtype, size: Size, seed: int, **settings: Any
) -> tuple[TransformerConfig, nn.Module]:
    """Returns the configuration and the reference of a family with random weights.

    See `check_family` for arguments and errors.
    """
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
    config, _ = interop.load(family, _build(family, given, dtype).state_dict(), **told)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return config, references.perturb(_build(family, config, dtype)).eval()


def _needs_one_vocabulary(family: str, settings: Mapping[str, Any]) -> bool:
    names = ("has_inputs", "tie_embeddings")
    chosen = {name: settings[name] for name in names if name in settings}
    return preset(family, **chosen).shares_source_and_target


def _build(family: str, config: TransformerConfig, dtype: Dtype, **options: Any) -> nn.Module:
    fields = dataclasses.asdict(config) | {"param_dtype": dtype, "dtype": dtype}
    return references.build(family, **fields, **options)


def load_reference(
    family: str, path: str | os.PathLike[str], dtype: Dtype, **overrides: Any
) -> tuple[TransformerConfig, nn.Module]:
    """Returns the configuration and the reference of a family with the weights of a file.

    Tables that are not learned are recomputed in `dtype`.

    Args:
      family: a key of `presets.FAMILIES`.
      path: the checkpoint: a file or, for `marian`, the folder of a whole model.
      dtype: the dtype that the weights are cast to.
      **overrides: settings that the file does not determine, see `interop.load`.

    Returns:
      The configuration of the file, and the module.

    Raises:
      UserError: as `interop.load`; or the reference lacks a tensor of the file.
    """
    family = canonical_family(family)
    config, tensors = _read(family, Path(path), overrides)
    check_special_tokens(config)
    module = _build(family, config, dtype, **_options(family, tensors))
    its_map = interop.FAMILIES[family]
    computed = {buffer.name for buffer in its_map.buffers(config)}
    weights = {
        name: torch.from_numpy(tensor).to(getattr(torch, dtype))
        for name, tensor in tensors.items()
        if name not in computed
    }
    missing, unexpected = module.load_state_dict(weights, strict=False)
    strangers = {*missing, *unexpected} - computed - its_map.omitted(config)
    if strangers:
        raise UserError(
            f"{path}: the reference of {family} differs from it in {', '.join(sorted(strangers))}"
        )
    return config, module.eval()


def _read(
    family: str, path: Path, overrides: Mapping[str, Any]
) -> tuple[TransformerConfig, Tensors]:
    """Returns the configuration and the published tensors of a checkpoint or of a whole model."""
    if not path.is_dir():
        config, _ = interop.load(family, path, **overrides)
        return config, checkpoint_files.read(path).tensors
    bundle, _ = convert.read_bundle(family, path, overrides)
    config = bundle.config.model
    return config, checkpoints.to_state_dict(interop.FAMILIES[family], config, bundle.params)


def _options(family: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Infers options of the reference that are not part of the configuration."""
    has_source_attention = any(".src_attn." in name for name in tensors)
    if family in ("annotated", "annotated_wide_heads") and not has_source_attention:
        return {"source_attention": "self_attn"}
    return {}
