"""The weight map of `torch`: `torch.nn.Transformer`, alone or in the translation tutorial's model.

A bare `torch.nn.Transformer` ("encoder.layers.0. ...") is converted to stacks without embeddings
and output; its configuration has vocabularies of size 0. The tutorial's model adds two embeddings,
a table of sinusoids and an output projection ("transformer.encoder.layers.0. ...").

`norm_position`, `activation` and `norm_epsilon` do not follow from shapes; give those that are not
PyTorch's defaults.
"""

from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.weight_maps.family import Buffer, Family, guess_tying, sinusoids
from flaxformer_mt.interop.weight_maps.rules import (
    TensorRule,
    embeddings,
    linear,
    norm,
    packed,
    same,
    transposed,
)

SOURCE = "src_tok_emb.embedding.weight"
TARGET = "tgt_tok_emb.embedding.weight"
OUTPUT = "generator.weight"
TABLE = "positional_encoding.pos_embedding"


def _is_bare(checkpoint: PublishedCheckpoint) -> bool:
    return all(name.startswith(("encoder.", "decoder.")) for name in checkpoint.tensors)


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    bare = _is_bare(checkpoint)
    prefix = "" if bare else "transformer."
    layer = f"{prefix}decoder.layers.0"
    hidden, narrow, layer_norm = f"{layer}.linear1", f"{layer}.linear2", f"{layer}.norm1.weight"
    outputs = ((TARGET, 0), (OUTPUT, 0), ("generator.bias", 0))
    return {
        "source_vocab_size": 0 if bare else checkpoint.size((SOURCE, 0)),
        "target_vocab_size": 0 if bare else checkpoint.size(*outputs),
        "d_model": checkpoint.size(
            (f"{hidden}.weight", 1), (f"{narrow}.weight", 0), (layer_norm, 0)
        ),
        "d_ff": checkpoint.size(
            (f"{hidden}.weight", 0), (f"{hidden}.bias", 0), (f"{narrow}.weight", 1)
        ),
        "num_encoder_layers": checkpoint.num_layers(f"{prefix}encoder.layers."),
        "num_decoder_layers": checkpoint.num_layers(f"{prefix}decoder.layers."),
    }


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    return {} if _is_bare(checkpoint) else guess_tying(checkpoint, SOURCE, TARGET, OUTPUT)


def _attention(ours: str, theirs: str) -> list[TensorRule]:
    projections = [f"{ours}/{name}" for name in ("query", "key", "value")]
    kernels = [f"{path}/kernel" for path in projections]
    biases = [f"{path}/bias" for path in projections]
    return [
        packed(kernels, f"{theirs}.in_proj_weight", transposed),
        packed(biases, f"{theirs}.in_proj_bias", same),
        *linear(f"{ours}/output", f"{theirs}.out_proj", bias=True),
    ]


def _feed_forward(ours: str, theirs: str) -> list[TensorRule]:
    return [
        *linear(f"{ours}/hidden", f"{theirs}.linear1", bias=True),
        *linear(f"{ours}/output", f"{theirs}.linear2", bias=True),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[TensorRule]:
    bare = not config.target_vocab_size
    prefix = "" if bare else "transformer."
    encoder, decoder = f"{prefix}encoder.layers.{{layer}}", f"{prefix}decoder.layers.{{layer}}"
    outside_of_stacks = [
        *embeddings(config, SOURCE, TARGET, OUTPUT),
        same("output/bias", "generator.bias"),
    ]
    final_norms = [
        *norm("encoder/final_norm", f"{prefix}encoder.norm"),
        *norm("decoder/final_norm", f"{prefix}decoder.norm"),
    ]
    return [
        *([] if bare else outside_of_stacks),
        *_attention("encoder/layers/self_attention", f"{encoder}.self_attn"),
        *norm("encoder/layers/self_attention_norm", f"{encoder}.norm1"),
        *_feed_forward("encoder/layers/feed_forward", encoder),
        *norm("encoder/layers/feed_forward_norm", f"{encoder}.norm2"),
        *_attention("decoder/layers/self_attention", f"{decoder}.self_attn"),
        *norm("decoder/layers/self_attention_norm", f"{decoder}.norm1"),
        *_attention("decoder/layers/cross_attention", f"{decoder}.multihead_attn"),
        *norm("decoder/layers/cross_attention_norm", f"{decoder}.norm2"),
        *_feed_forward("decoder/layers/feed_forward", decoder),
        *norm("decoder/layers/feed_forward_norm", f"{decoder}.norm3"),
        *(final_norms if config.final_norm else []),
    ]


def _buffers(config: TransformerConfig) -> list[Buffer]:
    if not config.target_vocab_size:
        return []
    table = sinusoids(config)
    return [Buffer(TABLE, lambda rows: table(rows)[:, None], rows=5000)]


FAMILY = Family(
    name="torch",
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    buffers=_buffers,
    open_switches=frozenset(
        {
            "norm_position",
            "norm_epsilon",
            "final_norm",
            "activation",
            "position_base",
            "scale_embeddings",
            "tie_embeddings",
        }
    ),
    order=(
        "transformer", "encoder", "decoder", "layers", "self_attn", "multihead_attn",
        "in_proj_weight", "in_proj_bias", "out_proj", "linear1", "linear2", "norm", "norm1",
        "norm2", "norm3", "generator", "src_tok_emb", "tgt_tok_emb", "positional_encoding",
        "embedding", "pos_embedding", "weight", "bias",
    ),
)  # fmt: skip
