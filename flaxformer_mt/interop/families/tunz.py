"""The weight map of `tunz`, with inputs and as a language model.

A language model of the published code has cross-attention parameters in every decoder layer, but
never uses them. Parameters without such carried tensors are written with copies of self-attention
instead.
"""

from typing import Any

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import Buffer, Family, guess_tying, head_width
from flaxformer_mt.interop.weight_maps.rules import TensorRule, embeddings, linear, norm, unused

SOURCE = "i_vocab_embedding.weight"
TARGET = "t_vocab_embedding.weight"
ENCODER = "encoder.layers.{layer}"
DECODER = "decoder.layers.{layer}"


def _has_inputs(checkpoint: PublishedCheckpoint) -> bool:
    return any(name.startswith(("encoder.", "i_vocab_embedding.")) for name in checkpoint.tensors)


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    layer = DECODER.format(layer=0)
    hidden, narrow = f"{layer}.ffn.layer1", f"{layer}.ffn.layer2.weight"
    query, key, value = (f"{layer}.self_attention.linear_{name}.weight" for name in "qkv")
    top_norm = "decoder.last_norm"
    has_inputs = _has_inputs(checkpoint)
    return {
        "has_inputs": has_inputs,
        "source_vocab_size": checkpoint.size((SOURCE, 0)) if has_inputs else 0,
        "target_vocab_size": checkpoint.size((TARGET, 0)),
        "d_model": checkpoint.size((TARGET, 1), (f"{top_norm}.weight", 0), (f"{top_norm}.bias", 0)),
        "d_ff": checkpoint.size((f"{hidden}.weight", 0), (f"{hidden}.bias", 0), (narrow, 1)),
        "head_dim": head_width(checkpoint.size((query, 0), (key, 0), (value, 0)), num_heads),
        "num_encoder_layers": checkpoint.num_layers("encoder.layers."),
        "num_decoder_layers": checkpoint.num_layers("decoder.layers."),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    source = SOURCE if _has_inputs(checkpoint) else None
    return guess_tying(checkpoint, source, TARGET, None)


def _attention(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *norm(f"{ours}_norm", f"{theirs}_norm"),
        *linear(f"{ours}/query", f"{theirs}.linear_q", bias=False),
        *linear(f"{ours}/key", f"{theirs}.linear_k", bias=False),
        *linear(f"{ours}/value", f"{theirs}.linear_v", bias=False),
        *linear(f"{ours}/output", f"{theirs}.output_layer", bias=False),
    ]


def _feed_forward(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *norm(f"{ours}_norm", f"{theirs}_norm"),
        *linear(f"{ours}/hidden", f"{theirs}.layer1", bias=True),
        *linear(f"{ours}/output", f"{theirs}.layer2", bias=True),
    ]


def _decoder_attentions(config: TransformerConfig) -> list[TensorRule]:
    rules = _attention("decoder/layers/self_attention", f"{DECODER}.self_attention")
    if config.has_inputs:
        cross = _attention("decoder/layers/cross_attention", f"{DECODER}.enc_dec_attention")
        return rules + cross
    return [
        unused(rule, rule.theirs[0].replace("self_attention", "enc_dec_attention"))
        for rule in rules
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    encoder = [
        *_attention("encoder/layers/self_attention", f"{ENCODER}.self_attention"),
        *_feed_forward("encoder/layers/feed_forward", f"{ENCODER}.ffn"),
        *norm("encoder/final_norm", "encoder.last_norm"),
    ]
    return [
        *embeddings(config, SOURCE if config.has_inputs else None, TARGET, None),
        *(encoder if config.has_inputs else []),
        *_decoder_attentions(config),
        *_feed_forward("decoder/layers/feed_forward", f"{DECODER}.ffn"),
        *norm("decoder/final_norm", "decoder.last_norm"),
    ]


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
