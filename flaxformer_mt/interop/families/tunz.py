"""The weight map of `tunz`, with inputs and as a language model.

A language model of the published code has cross-attention parameters in every decoder layer, but
never uses them. Parameters without such carried tensors are written with copies of self-attention
instead.
"""

from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import Buffer, Family, guess_tying
from flaxformer_mt.interop.weight_maps.rules import Layers, TensorRule, embeddings, unused

SOURCE = "i_vocab_embedding.weight"
TARGET = "t_vocab_embedding.weight"
LAYERS = Layers(
    encoder="encoder.layers.{layer}.",
    decoder="decoder.layers.{layer}.",
    modules={
        "self_attention": "self_attention",
        "self_attention_norm": "self_attention_norm",
        "cross_attention": "enc_dec_attention",
        "cross_attention_norm": "enc_dec_attention_norm",
        "feed_forward/hidden": "ffn.layer1",
        "feed_forward/output": "ffn.layer2",
        "feed_forward_norm": "ffn_norm",
    },
    stack_norms={"final_norm": "{stack}.last_norm"},
    projections=(".linear_q", ".linear_k", ".linear_v", ".output_layer"),
)


def _has_inputs(checkpoint: PublishedCheckpoint) -> bool:
    return any(name.startswith(("encoder.", "i_vocab_embedding.")) for name in checkpoint.tensors)


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    has_inputs = _has_inputs(checkpoint)
    return {
        "has_inputs": has_inputs,
        "source_vocab_size": checkpoint.size((SOURCE, 0)) if has_inputs else 0,
        "target_vocab_size": checkpoint.size((TARGET, 0)),
        "head_dim": LAYERS.key_width(checkpoint, num_heads),
        **LAYERS.sizes(checkpoint),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    source = SOURCE if _has_inputs(checkpoint) else None
    return guess_tying(checkpoint, source, TARGET, None)


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    layers = LAYERS.rules(config)
    if not config.has_inputs:
        layers = [_with_unused(rule) for rule in layers]
    return [
        *embeddings(config, SOURCE, TARGET, None),
        *layers,
    ]


def _with_unused(rule: TensorRule) -> TensorRule:
    (theirs,) = rule.theirs
    if "self_attention" not in theirs:
        return rule
    return unused(rule, theirs.replace("self_attention", "enc_dec_attention"))


def _buffers(config: TransformerConfig) -> list[Buffer]:
    frequencies = config.d_model // 2

    def inverse_timescales(rows: int) -> np.ndarray:
        return config.position_base ** (-np.arange(frequencies) / max(frequencies - 1, 1))

    return [Buffer("inv_timescales", inverse_timescales, rows=frequencies)]


FAMILY = Family(
    name="tunz",
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset({"tie_embeddings", "has_inputs"}),
    head_widths="rounded",
    order=(
        "inv_timescales", "t_vocab_embedding", "decoder", "i_vocab_embedding", "encoder", "layers",
        "self_attention_norm", "self_attention", "enc_dec_attention_norm", "enc_dec_attention",
        "linear_q", "linear_k", "linear_v", "output_layer", "ffn_norm", "ffn", "layer1", "layer2",
        "last_norm", "weight", "bias",
    ),
)  # fmt: skip
