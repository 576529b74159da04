"""M2M-100 and NLLB: Hugging Face's own model, with the interface of the references.

Pre-norm with final norms, fairseq's sinusoids, which are counted over real tokens from `pad_id` + 1
on, and one table of embeddings.

Source: https://github.com/huggingface/transformers (src/transformers/models/m2m_100)
"""

import torch
from torch import nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references import common
from flaxformer_mt.parity.references.marian import settings, with_our_forward
from flaxformer_mt.parity.trace.module_values import Tap


def build(config: TransformerConfig) -> nn.Module:
    options = M2M100Config(**settings("m2m100", config))
    model = with_our_forward(M2M100ForConditionalGeneration)(options)
    # Always float32 in Hugging Face: nothing could agree with it to more digits.
    if torch.get_default_dtype() == torch.float64:
        for stack in (model.model.encoder, model.model.decoder):
            positions = stack.embed_positions
            positions.weights = common.concatenated_sinusoids(*positions.weights.shape)
            positions.weights[config.pad_id] = 0
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    return common.fairseq_taps(config, "model.", Tap("embed_tokens"), Tap("layers.0", "input"))
