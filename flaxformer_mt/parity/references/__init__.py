"""References: the published Transformers in PyTorch, which our model must equal.

They are written from the equations, except for `torch` (PyTorch's own module) and those of Hugging
Face: `marian`, `mbart`, `m2m100`, `pegasus`, `fsmt`, `t5`, `umt5` and `t5gemma`. Parameters,
buffers and modules have the published names: a published state dict loads with `strict=True`.
Constants of a publication (epsilons, layouts, masks, fixed dropout rates) are literals here instead
of configuration fields, because they are what the comparison verifies.

    reference = build("tunz", d_model=64, num_heads=8, source_vocab_size=100, ...)
    logits = reference(source, target_input)

Tokens `source` [B, S] and `target_input` [B, T] are int64, the same as our model's; logits
[B, T, V]. Inside, `forward` of stacks, layers and their parts maps vectors [B, T, D] to [B, T, D];
in a decoder, the encoder's output [B, S, D] and its mask, bool [B, 1, S], follow the mask of the
target. Every module has `build(config)`, and `taps(config, module)`: where a module like the
reference computes each site of `parity.trace`. A `tunz` without inputs ignores `source`;
`double_projection` consists of layers only and takes vectors [B, S, D], [B, T, D] and masks.

Sinusoids are computed in the dtype in which a reference is built; `.double()` on a float32 one
would keep tables rounded to float32.
"""

import dataclasses
import importlib.util
from typing import Any

from torch import Tensor, nn, no_grad, randn_like

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats.registration import REFERENCES
from flaxformer_mt.parity.references.common import default_dtype as default_dtype
from flaxformer_mt.parity.trace.module_values import Tap
from flaxformer_mt.presets import FAMILIES, canonical_family, preset


def build(family: str, **sizes: Any) -> nn.Module:
    """Builds the reference of a family with random initial weights; raises UserError.

    `sizes` are fields of `TransformerConfig` whose value differs from the family's preset;
    `param_dtype` is the dtype. Other names are options of the reference: `published_head_join`
    (double_projection), `source_attention` (annotated, annotated_wide_heads), `batch_first`
    (torch); see their modules.
    """
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    options = {name: value for name, value in sizes.items() if name not in fields}
    config = preset(family, **{name: sizes[name] for name in sizes if name in fields})
    module = _module(family)
    with default_dtype(config.param_dtype):
        reference = module.build(config, **options)
    for part in reference.modules() if config.pad_id < 0 else ():
        if isinstance(part, nn.Embedding):  # It takes -1 for the last row.
            part.padding_idx = None
    return reference


def of_config(family: str, config: TransformerConfig, dtype: str, **options: Any) -> nn.Module:
    """Builds the reference of a family with this configuration and `dtype`."""
    fields = dataclasses.asdict(config) | {"param_dtype": dtype, "dtype": dtype}
    return build(family, **fields, **options)


def taps(family: str, config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of a module like a family's reference; UserError if there is none."""
    return _module(family).taps(config, module)


def _module(family: str) -> Any:
    name = canonical_family(family)
    if name in REFERENCES:
        return REFERENCES[name]
    if name not in FAMILIES or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise UserError(f"{family} has no reference with known taps: give taps=...")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"the reference of {family} needs {error.name}: pip install 'flaxformer_mt[parity]'"
        ) from error


def perturb(reference: nn.Module) -> nn.Module:
    """Adds noise to biases, norms and embeddings of padding, whose zeros or ones mask errors."""
    with no_grad():
        vectors: list[Tensor] = [p for p in reference.parameters() if p.dim() == 1]
        vectors += [buffer for name, buffer in reference.named_buffers() if name.endswith("bias")]
        vectors += [
            table.weight[table.padding_idx]
            for table in reference.modules()
            if isinstance(table, nn.Embedding)
            and table.padding_idx is not None
            and table.weight.requires_grad
        ]
        for vector in vectors:
            vector.add_(0.1 * randn_like(vector))
    return reference
