"""Our parameters as CTranslate2's model specification.

The specification has switches of its own for most of ours. What it lacks is written as equivalent
weights:

* All position kinds but rotary become tables: of vectors by position, or of biases by distance.
  (CTranslate2 computes sinusoids of one kind only, and ALiBi in decoders only.)
* Its queries, keys and values have the same width: narrower ones are padded with zeros.
* It can choose any token of the vocabulary: tokens that our search never chooses get the output
  bias `NEVER`. Log-probabilities are then ours with `decode.renormalize`.

Source: CTranslate2 4.8, python/ctranslate2/specs/transformer_spec.py, src/layers/transformer.cc and
src/layers/attention.cc.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.interop.weight_maps.family import sinusoids
from flaxformer_mt.interop.weight_maps.mapping import by_path
from flaxformer_mt.model.positions import POSITION_KINDS
from flaxformer_mt.model.transformer import ZERO_VECTOR

NEVER = -1e4
"""Output bias of tokens that are never chosen; their probability is 0, also in float16."""

ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "gelu_tanh": common_spec.Activation.GELUTanh,
    "silu": common_spec.Activation.SWISH,
}

_Arrays = Mapping[str, np.ndarray]


def to_spec(
    config: TransformerConfig, params: Mapping[str, Any], decode: DecodeConfig
) -> transformer_spec.TransformerSpec:
    """Returns the specification of a model that `exports.ctranslate2_obstacle` allows.

    It has no vocabularies yet. `decode` says which attention aligns source and target.
    """
    c = config
    # Copies, because quantization scales arrays in place.
    arrays = {path: np.array(array, np.float32) for path, array in by_path(params).items()}
    encoder = transformer_spec.TransformerEncoderSpec(
        c.num_encoder_layers, c.num_heads, **_stack_options(c)
    )
    decoder = transformer_spec.TransformerDecoderSpec(
        c.num_decoder_layers,
        c.num_heads,
        alignment_layer=decode.alignment_layer,
        alignment_heads=decode.alignment_head + 1,  # The first heads; 0 = all.
        **_stack_options(c),
    )
    target = arrays["target_embedding/embedding"]
    shared = c.shares_source_and_target
    encoder.embeddings[0].weight = target if shared else arrays["source_embedding/embedding"]
    decoder.embeddings.weight = target
    decoder.start_from_zero_embedding = c.bos_id == ZERO_VECTOR or (
        c.zero_pad_embeddings and c.bos_id == c.pad_id
    )
    _set_projection(decoder, c, arrays, forbidden_token_ids(c, decode))
    for stack, spec in (("encoder", encoder), ("decoder", decoder)):
        _set_stack(spec, c, arrays, stack)
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    # Outside the root, an epsilon this small only matters for rows that are all but constant.
    is_outside = c.norm_kind == "unbiased_std"
    spec.config.layer_norm_epsilon = c.norm_epsilon**2 if is_outside else c.norm_epsilon
    return spec


def _stack_options(c: TransformerConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "no_final_norm": not c.final_norm,
        "activation": ACTIVATIONS[c.activation],
        "layernorm_embedding": c.embedding_norm,
        "relative_attention_bias": POSITION_KINDS[c.position_kind].bias is not None,
        "rms_norm": c.norm_kind == "rms",
        "ffn_glu": c.feed_forward_gate,
        "head_dim": max(c.key_width, c.value_width),
        "num_heads_kv": c.kv_heads if c.kv_heads < c.num_heads else None,
    }
    if c.position_kind == "rotary":
        options |= {
            "rotary_dim": c.key_width,
            "rotary_interleave": c.position_layout == "interleaved",
            "rotary_base": c.position_base,
        }
    return options


def _set_projection(
    decoder: transformer_spec.TransformerDecoderSpec,
    c: TransformerConfig,
    arrays: _Arrays,
    forbidden: Sequence[int],
) -> None:
    target = arrays["target_embedding/embedding"]
    scale = c.d_model**-0.5 if c.scale_logits else 1.0
    bias = np.zeros(c.target_vocab_size, np.float32)
    if c.output_bias:
        bias += arrays["output/bias"] * np.float32(scale)
    bias[list(forbidden)] = NEVER
    decoder.projection.weight = (
        target if c.shares_target_and_output else _transposed(arrays["output/kernel"])
    )
    decoder.projection.bias = bias
    if c.scale_logits:
        decoder.scale_outputs = scale


def _set_stack(spec: Any, c: TransformerConfig, arrays: _Arrays, stack: str) -> None:
    spec.pre_norm = c.norm_position == "pre"
    spec.scale_embeddings = c.scale_embeddings
    if hasattr(spec, "position_encodings"):
        side = "source" if stack == "encoder" else "target"
        spec.position_encodings.encodings = _position_vectors(c, arrays, side)
    if c.embedding_norm:
        _set_norm(spec.layernorm_embedding, c, arrays, f"{stack}/embedding_norm")
    if c.final_norm:
        _set_norm(spec.layer_norm, c, arrays, f"{stack}/final_norm")
    bias = _distance_bias(c, arrays, stack)
    prefix = f"{stack}/layers/"
    stacked = {
        path.removeprefix(prefix): array
        for path, array in arrays.items()
        if path.startswith(prefix)
    }
    for number, layer in enumerate(spec.layer):
        own = {path: array[number] for path, array in stacked.items()}
        _set_attention(layer.self_attention, c, own, "self_attention", [("query", "key", "value")])
        if bias is not None:
            layer.self_attention.relative_attention_bias = bias
            layer.self_attention.relative_attention_max_distance = np.int32(len(bias))
        if stack == "decoder":
            _set_attention(
                layer.attention, c, own, "cross_attention", [("query",), ("key", "value")]
            )
        _set_norm(layer.ffn.layer_norm, c, own, "feed_forward_norm")
        maps = [(layer.ffn.linear_0, "hidden"), (layer.ffn.linear_1, "output")]
        if c.feed_forward_gate:
            maps.append((layer.ffn.linear_0_noact, "gate"))
        for linear, name in maps:
            linear.weight = _transposed(own[f"feed_forward/{name}/kernel"])
            if c.feed_forward_bias:
                linear.bias = own[f"feed_forward/{name}/bias"]


def _set_attention(
    spec: Any, c: TransformerConfig, own: _Arrays, name: str, groups: Sequence[Sequence[str]]
) -> None:
    _set_norm(spec.layer_norm, c, own, f"{name}_norm")
    # The default is that of the padded width.
    spec.queries_scale = c.key_width**-0.5 if c.scale_scores else 1.0
    for linear, group in zip(spec.linear, groups, strict=False):
        kernels = [_padded_heads(c, own[f"{name}/{part}/kernel"], part) for part in group]
        linear.weight = _transposed(np.concatenate(kernels, axis=1))
        if c.qkv_bias:
            biases = [_padded_heads(c, own[f"{name}/{part}/bias"], part) for part in group]
            linear.bias = np.concatenate(biases)
    output = _padded_heads(c, own[f"{name}/output/kernel"].T, "output")  # [D, H * U]
    spec.linear[-1].weight = np.ascontiguousarray(output)
    if c.attention_output_bias:
        spec.linear[-1].bias = own[f"{name}/output/bias"]


def _padded_heads(c: TransformerConfig, array: np.ndarray, part: str) -> np.ndarray:
    """Pads each head's part of the last axis [..., H * K] to the common width with zeros."""
    num_heads = c.kv_heads if part in ("key", "value") else c.num_heads
    heads = array.reshape(*array.shape[:-1], num_heads, -1)
    width = max(c.key_width, c.value_width)
    padding = [(0, 0)] * (heads.ndim - 1) + [(0, width - heads.shape[-1])]
    return np.pad(heads, padding).reshape(*array.shape[:-1], -1)


def _set_norm(spec: Any, c: TransformerConfig, arrays: _Arrays, path: str) -> None:
    # The unbiased standard deviation is larger.
    factor = ((c.d_model - 1) / c.d_model) ** 0.5 if c.norm_kind == "unbiased_std" else 1.0
    spec.gamma = arrays[f"{path}/scale"] * np.float32(factor)
    if c.norm_kind != "rms":
        spec.beta = arrays[f"{path}/bias"]


def _transposed(kernel: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(kernel.T)


def _position_vectors(c: TransformerConfig, arrays: _Arrays, side: str) -> np.ndarray:
    if c.position_kind == "learned":
        return arrays[f"{side}_positions/embedding"][c.position_offset :]
    if c.position_kind == "sinusoidal":
        return sinusoids(c)(c.max_length).astype(np.float32)
    return np.zeros((c.max_length, c.d_model), np.float32)


def _distance_bias(c: TransformerConfig, arrays: _Arrays, stack: str) -> np.ndarray | None:
    """Returns the bias of self-attention [N, H] by bucket of distances, or None.

    CTranslate2's buckets are T5's: each distance below N / 2 (in the encoder N / 4, because keys
    after the query have buckets of their own) has one. N is so large that these are all distances
    that differ; the other buckets get the bias of the longest of these.
    """
    kind = POSITION_KINDS[c.position_kind]
    if kind.bias is None:
        return None
    longest = c.max_length
    if c.position_kind == "t5_relative":
        longest = c.relative_position_max_distance
    bidirectional = stack == "encoder"
    # [H, 2 * longest + 1]: of one query, from the keys before it to those after it.
    bias = kind.bias(c, bidirectional).apply(
        {"params": _bias_parameters(c, arrays, stack)},
        jnp.array([[longest]]),
        jnp.arange(2 * longest + 1)[None],
    )
    by_key = np.asarray(bias, np.float32)[0, :, 0].T
    directions = [by_key[longest::-1], by_key[longest:]][: 1 + bidirectional]
    buckets = np.minimum(np.arange(2 * longest), longest)
    return np.concatenate([direction[buckets] for direction in directions])


def _bias_parameters(c: TransformerConfig, arrays: _Arrays, stack: str) -> dict[str, np.ndarray]:
    if c.position_kind != "t5_relative":
        return {}
    if c.relative_position_sharing == "stack":
        return {"embedding": arrays[f"{stack}/position_bias/embedding"]}
    return {"embedding": arrays[f"{stack}/layers/position_bias/embedding"][0]}
