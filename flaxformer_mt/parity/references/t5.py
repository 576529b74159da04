"""T5, T5 1.1, mT5 and Flan-T5: Hugging Face's own model, with the interface of the references.

Pre-norm with root-mean-square norms, no biases, unscaled scores with a bias for each bucket of
distances, and in T5 1.1 a gated feed-forward network and an output of its own.

Source: https://github.com/huggingface/transformers (src/transformers/models/t5)
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.families.t5 import ACTIVATIONS
from flaxformer_mt.parity.references.common import attention_taps
from flaxformer_mt.parity.references.marian import Forward
from flaxformer_mt.parity.trace import Tap, for_layers


class T5(Forward, T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` with the `forward` of the other references."""


class _WideNorm(T5LayerNorm):
    """The norm with a mean square in the dtype of its input: Hugging Face's is always float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        mean_square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean_square + self.variance_epsilon)


def build(config: TransformerConfig) -> T5:
    """Builds the reference with the sizes, tying, activation, gate and buckets of `config`.

    Hugging Face's norms are float32 whatever the model's dtype. In a float64 model they are
    float64, since nothing could agree with them to more digits.
    """
    kinds = {ours: theirs for theirs, ours in ACTIVATIONS.items() if "gated" not in theirs}
    gated = {ours: theirs for theirs, ours in ACTIVATIONS.items() if theirs.startswith("gated-")}
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        # False only switches the scale of the logits off.
        "tie_word_embeddings": config.scale_logits,
        "decoder_start_token_id": config.bos_id,
    }
    model = T5(
        T5Config(
            vocab_size=config.target_vocab_size,
            d_model=config.d_model,
            d_kv=config.key_width,
            d_ff=config.d_ff,
            num_layers=config.num_encoder_layers,
            num_decoder_layers=config.num_decoder_layers,
            num_heads=config.num_heads,
            relative_attention_num_buckets=config.relative_position_buckets,
            relative_attention_max_distance=config.relative_position_max_distance,
            dropout_rate=config.dropout_rate,
            layer_norm_epsilon=config.norm_epsilon,
            feed_forward_proj=(gated if config.feed_forward_gate else kinds)[config.activation],
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            **options,
        )
    )
    if not config.shares_target_and_output:
        shape = (config.target_vocab_size, config.d_model)
        model.lm_head.weight = nn.Parameter(torch.randn(shape) * config.d_model**-0.5)
    if torch.get_default_dtype() == torch.float64:
        for module in model.modules():
            if isinstance(module, T5LayerNorm):
                module.__class__ = _WideNorm
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    attentions = {"self": "SelfAttention"}
    return {
        "source/embedding": Tap("encoder.embed_tokens"),
        **for_layers(config.num_encoder_layers, _layer_taps("encoder", attentions, config)),
        "encoder/final_norm": Tap("encoder.final_layer_norm"),
        "target/embedding": Tap("decoder.embed_tokens"),
        **for_layers(
            config.num_decoder_layers,
            _layer_taps("decoder", attentions | {"cross": "EncDecAttention"}, config),
        ),
        "decoder/final_norm": Tap("decoder.final_layer_norm"),
    }


def _layer_taps(
    stack: str, attentions: dict[str, str], config: TransformerConfig
) -> dict[str, Tap]:
    site, block = f"{stack}/layers/{{layer}}", f"{stack}.block.{{layer}}"
    found = {site: Tap(f"{block}.layer.{len(attentions)}")}
    for index, (kind, name) in enumerate(attentions.items()):
        layer, group = f"{block}.layer.{index}", f"{site}/{kind}_attention"
        linears = [f"{layer}.{name}.{letter}" for letter in "qkvo"]
        found |= attention_taps(group, linears, f"{layer}.{name}")
        found[f"{group}_norm"] = Tap(f"{layer}.layer_norm")
        found[f"{group}_sum"] = Tap(layer, op="add")
    layer, group = f"{block}.layer.{len(attentions)}", f"{site}/feed_forward"
    network = f"{layer}.DenseReluDense"
    found[f"{group}/hidden"] = Tap(f"{network}.{'wi_0' if config.feed_forward_gate else 'wi'}")
    if config.feed_forward_gate:
        found[f"{group}/gate"] = Tap(f"{network}.wi_1")
    return found | {
        f"{group}/activated": Tap(f"{network}.wo", "input"),
        f"{group}/output": Tap(f"{network}.wo"),
        f"{group}_norm": Tap(f"{layer}.layer_norm"),
        f"{group}_sum": Tap(layer, op="add"),
    }
