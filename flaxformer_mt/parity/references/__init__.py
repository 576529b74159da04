"""The published Transformers in PyTorch: what our model must equal.

They are written from the equations, but parameters, buffers and modules have the published names,
so that a state dict of the published code loads with `strict=True`. Constants of a publication
(epsilons, layouts, masks, fixed dropout rates) are written out here and not read from a
configuration: they are what the comparison is about.

Every reference is used the same way:

    reference = build("tunz", d_model=64, num_heads=8, source_vocab_size=100, ...)
    logits = reference(source, target_input)
    logits, attention = reference(source, target_input, return_attention=True)

with int64 tokens `source` [B, S] and `target_input` [B, T], the decoder's input as our model takes
it, and logits [B, T, V]. Two things differ by nature: a `tunz` without inputs ignores `source`;
`double_projection` is layers only and takes vectors [B, S, D], [B, T, D] and masks (see its file).

Sinusoids are computed in the dtype in which a reference is built, so that a float64 reference is
float64 throughout; `.double()` on a float32 one would keep tables rounded to float32.
"""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

from torch import Tensor, nn, no_grad, randn_like

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.references.common import default_dtype
from flaxformer_mt.parity.trace import Tap
from flaxformer_mt.presets import FAMILIES, canonical_family, preset

__all__ = ["build", "default_dtype", "perturb", "taps"]


def build(family: str, **sizes: Any) -> nn.Module:
    """The reference of a family, with freshly drawn weights.

    Args:
      family: a key of `presets.FAMILIES`.
      **sizes: fields of `TransformerConfig` whose value differs from the family's preset;
        `param_dtype` is the dtype. Whatever is no such field is an option of the reference:
        `published_head_join` (double_projection), `source_attention` (annotated,
        annotated_wide_heads), `batch_first` (torch); the files say what they mean.

    Raises:
      UserError: the family or a size is unknown.
    """
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    options = {name: value for name, value in sizes.items() if name not in fields}
    config = preset(family, **{name: sizes[name] for name in sizes if name in fields})
    module = _module(family)
    with default_dtype(config.param_dtype):
        return module.build(config, **options)


def taps(family: str, config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Where a module laid out as the reference of a family computes each site of `parity.trace`.

    Raises:
      UserError: the family has no reference.
    """
    if canonical_family(family) not in FAMILIES:
        raise UserError(f"{family} has no reference whose taps are known: give taps=...")
    return _module(family).taps(config, module)


def _module(family: str) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{canonical_family(family)}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"the reference of {family} needs {error.name}: pip install 'flaxformer_mt[parity]'"
        ) from error


def perturb(reference: nn.Module) -> nn.Module:
    """Adds noise to what would hide errors at its initial zeros or ones.

    That is biases, norms, and the vectors of padding.
    """
    with no_grad():
        vectors: list[Tensor] = [p for p in reference.parameters() if p.dim() == 1]
        vectors += [buffer for name, buffer in reference.named_buffers() if name.endswith("bias")]
        vectors += [
            table.weight[table.padding_idx]
            for table in reference.modules()
            if isinstance(table, nn.Embedding) and table.padding_idx is not None
        ]
        for vector in vectors:
            vector.add_(0.1 * randn_like(vector))
    return reference
