"""T5Gemma: Hugging Face's own model, with the interface of the references.

Two norms in each sub-layer, rotary positions, grouped queries, soft caps of scores and logits, and
a window in every second self-attention.

Source: https://github.com/huggingface/transformers (src/transformers/models/t5gemma)
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.models.t5gemma import modeling_t5gemma as published

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.t5gemma import LAYERS
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.references.marian import with_our_forward
from flaxformer_mt.parity.trace.module_values import Tap

# Norms, rotations and softmax are always float32 in Hugging Face: nothing could agree with them to
# more digits.


class _WideNorm(published.T5GemmaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)


class _WideRotary(published.T5GemmaRotaryEmbedding):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = 2 * self.inv_freq.numel()
        base = self.config.rope_parameters["rope_theta"]
        angles = position_ids[..., None] / base ** (torch.arange(0, width, 2).double() / width)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def _wide_attention(module, query, key, value, mask, dropout, scaling, softcap, **_):
    key, value = (published.repeat_kv(each, module.num_key_value_groups) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = nn.functional.softmax(scores + (0 if mask is None else mask), dim=-1)
    kept = nn.functional.dropout(weights, dropout, module.training)
    return (kept @ value).transpose(1, 2), weights


AttentionInterface.register("wide_eager", _wide_attention)
AttentionMaskInterface.register("wide_eager", eager_mask)


def build(config: TransformerConfig) -> nn.Module:
    hub = HUB_FAMILIES["t5gemma"]
    settings = hub.nested(hub.settings(config, {}))
    is_wide = torch.get_default_dtype() == torch.float64
    options = {"attn_implementation": "wide_eager" if is_wide else "eager"}
    # With the published 0.02, a small model would not attend to anything.
    for each in (settings, settings["encoder"], settings["decoder"]):
        each["initializer_range"] = config.d_model**-0.5
    model = with_our_forward(T5GemmaForConditionalGeneration)(T5GemmaConfig(**settings, **options))
    wide = {published.T5GemmaRMSNorm: _WideNorm, published.T5GemmaRotaryEmbedding: _WideRotary}
    for module in model.modules() if is_wide else ():
        module.__class__ = wide.get(type(module), type(module))
    return cast(nn.Module, model)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:

    def in_stack(side, stack, sublayers, found):
        layer = f"model.{stack}.layers.{{layer}}"
        found[f"{stack}/layers/{{layer}}/feed_forward/gate"] = Tap(f"{layer}.mlp.up_proj")
        found[f"{side}/embedding"] = Tap(f"model.{stack}", op="mul")
        found[f"{stack}/final_norm"] = Tap(f"model.{stack}.norm")

    return common.both_stacks(config, LAYERS, in_stack)
