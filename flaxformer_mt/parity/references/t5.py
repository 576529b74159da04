"""T5, T5 1.1, mT5 and Flan-T5: Hugging Face's own model, with the interface of the references.

Pre-norm with root-mean-square norms, no biases, unscaled scores with a bias for each bucket of
distances, and in T5 1.1 a gated feed-forward network and an output of its own.

Source: https://github.com/huggingface/transformers (src/transformers/models/t5)
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.t5 import layers
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.references.marian import with_our_forward
from flaxformer_mt.parity.trace.module_values import Tap


class _WideNorm(T5LayerNorm):
    """The norm with a mean square in the dtype of its input: Hugging Face's is always float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean_square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)


def build(config: TransformerConfig) -> nn.Module:
    return of_classes(config, "t5", T5Config, T5ForConditionalGeneration)


def of_classes(config: TransformerConfig, family: str, settings: Any, published: Any) -> nn.Module:
    """Builds the reference of a family like T5 with its classes of settings and of the model."""
    options = HUB_FAMILIES[family].settings(config, {}) | {"attn_implementation": "eager"}
    model = with_our_forward(published)(settings(**options))
    if not config.shares_target_and_output:
        shape = (config.target_vocab_size, config.d_model)
        model.lm_head.weight = nn.Parameter(torch.randn(shape) * config.d_model**-0.5)
    # Always float32 in Hugging Face: nothing could agree with it to more digits.
    if torch.get_default_dtype() == torch.float64:
        kind = type(model.encoder.final_layer_norm)
        for module in model.modules():
            if isinstance(module, kind):
                module.__class__ = _WideNorm
    return cast(nn.Module, model)


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:

    def in_stack(side, stack, sublayers, found):
        site, block = f"{stack}/layers/{{layer}}", f"{stack}.block.{{layer}}"
        network = f"{block}.layer.{len(sublayers) - 1}"
        found[site] = Tap(network)
        for index, name in enumerate(sublayers):
            found[f"{site}/{name}_sum"] = Tap(f"{block}.layer.{index}", op="add")
        if config.feed_forward_gate:
            found[f"{site}/feed_forward/gate"] = Tap(f"{network}.DenseReluDense.wi_1")
        found[f"{side}/embedding"] = Tap(f"{stack}.embed_tokens")
        found[f"{stack}/final_norm"] = Tap(f"{stack}.final_layer_norm")

    return common.both_stacks(config, layers(config.feed_forward_gate), in_stack)
