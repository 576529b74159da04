"""mBART and BART: Hugging Face's own models, with the interface of the references.

Learned positions from row 2, a norm after the embeddings, and in mBART pre-norms with final norms.

Source: https://github.com/huggingface/transformers (src/transformers/models/mbart, models/bart)
"""

from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
)

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.common import both_stacks, fairseq_layer_taps
from flaxformer_mt.parity.references.marian import settings, with_our_forward
from flaxformer_mt.parity.trace import Tap


def build(config: TransformerConfig) -> nn.Module:
    options = settings("mbart", config)
    if config.norm_position == "pre":
        return with_our_forward(MBartForConditionalGeneration)(MBartConfig(**options))
    return with_our_forward(BartForConditionalGeneration)(BartConfig(**options))


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:

    def in_stack(side, stack, attentions):
        norm = f"model.{stack}.layernorm_embedding"
        found = fairseq_layer_taps(stack, f"model.{stack}", attentions, config.norm_position)
        found[f"{side}/embedding"] = Tap(f"model.{stack}.embed_tokens")
        found[f"{side}/embedded"] = Tap(norm, "input")
        found[f"{stack}/embedding_norm"] = Tap(norm)
        if config.final_norm:
            found[f"{stack}/final_norm"] = Tap(f"model.{stack}.layer_norm")
        return found

    return both_stacks(config, in_stack, ("self_attn", "encoder_attn"))
