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
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.references.marian import settings, with_our_forward
from flaxformer_mt.parity.trace.module_values import Tap


def build(config: TransformerConfig) -> nn.Module:
    options = settings("mbart", config)
    if config.norm_position == "pre":
        return with_our_forward(MBartForConditionalGeneration)(MBartConfig(**options))
    return with_our_forward(BartForConditionalGeneration)(BartConfig(**options))


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    embedded = Tap("layernorm_embedding", "input")
    return common.fairseq_taps(config, "model.", Tap("embed_tokens"), embedded)
