"""M2M-100 and NLLB: Hugging Face's own model, with the interface of the references.

Pre-norm with final norms, fairseq's sinusoids, which are counted over real tokens from `pad_id` + 1
on, and one table of embeddings.

Source: https://github.com/huggingface/transformers (src/transformers/models/m2m_100)
"""

import math

import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.parity.references.marian import Forward, layer_taps, settings
from flaxformer_mt.parity.trace import Tap, for_layers


class M2M100(Forward, M2M100ForConditionalGeneration):
    """`M2M100ForConditionalGeneration` with the `forward` of the other references."""


def _position_table(rows: int, d_model: int, padding: int) -> Tensor:
    """Sines, then cosines [rows, D], in float64; zeros at padding and in the last odd column."""
    pairs = d_model // 2
    frequencies = torch.exp(
        torch.arange(pairs, dtype=torch.float64) * -(math.log(10000) / (pairs - 1))
    )
    angles = torch.arange(rows)[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    table = nn.functional.pad(table, (0, d_model % 2))
    table[padding] = 0
    return table


def build(config: TransformerConfig) -> M2M100:
    """Builds the reference with the sizes, activation and scale of `config`.

    Hugging Face computes sinusoids in float32 whatever the model's dtype. In a float64 model they
    are computed anew, since nothing could agree with them to more digits.

    Matrices start as wide as 1/sqrt(D), not 0.02: a small model would not attend to anything.
    """
    model = M2M100(M2M100Config(**settings(config), vocab_size=config.target_vocab_size))
    if torch.get_default_dtype() == torch.float64:
        for stack in (model.model.encoder, model.model.decoder):
            positions = stack.embed_positions
            rows, d_model = positions.weights.shape
            positions.weights = _position_table(rows, d_model, config.pad_id)
    return model


def taps(config: TransformerConfig, module: nn.Module) -> dict[str, Tap]:
    """Returns the taps of `module`: where it computes each site of `parity.trace`."""
    attentions = {"self": "self_attn"}
    return {
        **_stack_taps("source", "encoder"),
        **for_layers(config.num_encoder_layers, layer_taps("encoder", attentions, "pre")),
        **_stack_taps("target", "decoder"),
        **for_layers(
            config.num_decoder_layers,
            layer_taps("decoder", attentions | {"cross": "encoder_attn"}, "pre"),
        ),
    }


def _stack_taps(side: str, stack: str) -> dict[str, Tap]:
    return {
        f"{side}/embedding": Tap(f"model.{stack}.embed_tokens"),
        f"{side}/embedded": Tap(f"model.{stack}.layers.0", "input"),
        f"{stack}/final_norm": Tap(f"model.{stack}.layer_norm"),
    }
