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
from flaxformer_mt.interop.weight_maps import rules
from flaxformer_mt.interop.weight_maps.family import Family, guess_tying, sinusoid_buffers

SOURCE = "src_tok_emb.embedding.weight"
TARGET = "tgt_tok_emb.embedding.weight"
OUTPUT = "generator.weight"
TABLE = "positional_encoding.pos_embedding"


def _is_bare(checkpoint: PublishedCheckpoint) -> bool:
    return all(name.startswith(("encoder.", "decoder.")) for name in checkpoint.tensors)


def layers(bare: bool) -> rules.Layers:
    """Returns the names of the layers, of a bare `torch.nn.Transformer` or of the whole model."""
    prefix = "" if bare else "transformer."
    return rules.Layers(
        encoder=f"{prefix}encoder.layers.{{layer}}.",
        decoder=f"{prefix}decoder.layers.{{layer}}.",
        modules={
            "self_attention": "self_attn",
            "self_attention_norm": "norm1",
            "cross_attention": "multihead_attn",
            "cross_attention_norm": "norm2",
            "feed_forward/hidden": "linear1",
            "feed_forward/output": "linear2",
            "feed_forward_norm": "norm3",
        },
        encoder_modules={"feed_forward_norm": "norm2"},
        stack_norms={"final_norm": f"{prefix}{{stack}}.norm"},
        attention=_attention,
    )


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    if _is_bare(checkpoint):
        no_tokens = {"source_vocab_size": 0, "target_vocab_size": 0}
        return no_tokens | layers(bare=True).sizes(checkpoint)
    sizes = layers(bare=False).sizes_of_model([SOURCE], [TARGET, OUTPUT, "generator.bias"])
    return sizes(checkpoint, num_heads)


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    return {} if _is_bare(checkpoint) else guess_tying(checkpoint, SOURCE, TARGET, OUTPUT)


def _attention(config: TransformerConfig, ours: str, theirs: str) -> list[rules.TensorRule]:
    projections = [f"{ours}/{name}" for name in ("query", "key", "value")]
    kernels = [f"{path}/kernel" for path in projections]
    biases = [f"{path}/bias" for path in projections]
    return [
        rules.packed(kernels, f"{theirs}.in_proj_weight", rules.transposed),
        rules.packed(biases, f"{theirs}.in_proj_bias", rules.same),
        *rules.linear(f"{ours}/output", f"{theirs}.out_proj"),
    ]


def _rules(config: TransformerConfig, layout: str) -> list[rules.TensorRule]:
    bare = not config.target_vocab_size
    outside_of_stacks = [
        *rules.embeddings(config, SOURCE, TARGET, OUTPUT),
        rules.same("output/bias", "generator.bias"),
    ]
    return [
        *([] if bare else outside_of_stacks),
        *layers(bare).rules(config),
    ]


FAMILY = Family(
    name="torch",
    sizes=_sizes,
    guess=_guess,
    rules=_rules,
    buffers=lambda config: sinusoid_buffers(config, TABLE) if config.target_vocab_size else [],
    open_switches=frozenset({
        "norm_position", "norm_epsilon", "final_norm", "activation", "position_base",
        "scale_embeddings", "tie_embeddings",
    }),
    order=(
        "transformer", "encoder", "decoder", "layers", "self_attn", "multihead_attn",
        "in_proj_weight", "in_proj_bias", "out_proj", "linear1", "linear2", "norm", "norm1",
        "norm2", "norm3", "generator", "src_tok_emb", "tgt_tok_emb", "positional_encoding",
        "embedding", "pos_embedding", "weight", "bias",
    ),
)  # fmt: skip
