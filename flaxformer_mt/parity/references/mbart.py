"""mBART and BART: Hugging Face's own models, with the interface of the references.

Learned positions from row 2, a norm after the embeddings, and in mBART pre-norms with final norms.

Source: https://github.com/huggingface/transformers (src/transformers/models/mbart, models/bart)
"""

from typing import Any

from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
)

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.marian import Forward, layer_taps, settings
from flaxformer_mt.parity.trace import Tap, for_layers


class MBart(Forward, MBartForConditionalGeneration):
    """`MBartForConditionalGeneration` with the `forward` of the other references."""


class Bart(Forward, BartForConditionalGeneration):
    """`BartForConditionalGeneration` with the `forward` of the other references."""


def build(config: TransformerConfig) -> nn.Module:
    """Builds the reference with the sizes, norm position, activation and scale of `config`.

    Matrices start as wide as 1/sqrt(D), not 0.02: a small model would not attend to anything.
    """
    options: dict[str, Any] = settings(config) | {"vocab_size": config.target_vocab_size}
    if config.norm_position == "pre":
        return MBart(MBartConfig(**options))
    return Bart(BartConfig(**options))


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    attentions = {"self": "self_attn"}
    return {
        **_stack_taps("source", "encoder", config),
        **for_layers(
            config.num_encoder_layers, layer_taps("encoder", attentions, config.norm_position)
        ),
        **_stack_taps("target", "decoder", config),
        **for_layers(
            config.num_decoder_layers,
            layer_taps("decoder", attentions | {"cross": "encoder_attn"}, config.norm_position),
        ),
    }


def _stack_taps(side: str, stack: str, config: TransformerConfig) -> dict[str, Tap]:
    norm = f"model.{stack}.layernorm_embedding"
    found = {
        f"{side}/embedding": Tap(f"model.{stack}.embed_tokens"),
        f"{side}/embedded": Tap(norm, "input"),
        f"{stack}/embedding_norm": Tap(norm),
    }
    if config.final_norm:
        found[f"{stack}/final_norm"] = Tap(f"model.{stack}.layer_norm")
    return found
