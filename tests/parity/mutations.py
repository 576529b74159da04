"""The mutations of references, and the diagnosis that each must get."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from module_changes import (
    Change,
    attends_by_self_attention,
    attention,
    borrowed,
    by_feature,
    changed_weight,
    dropped,
    everything,
    feed_forward_first,
    keys_that_are_real,
    masked_by,
    memory_of_layer,
    narrow_norm,
    narrow_statistics,
    norm,
    positions,
    post_norm,
    pre_norm,
    source_attention_by,
    unnormalised_memory,
    with_forward,
    with_output,
    with_values,
)
from torch import Tensor, nn
from toy_references import DOUBLE_PROJECTION as DOUBLE_PROJECTION_LAYERS
from toy_references import GROUPED_QUERIES, VARIANTS
from transformers.models.t5.modeling_t5 import T5LayerNorm

from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity.references.common import join_heads, split_heads

FAMILIES = {
    "annotated": VARIANTS["annotated_1000"],
    "jadore801120": VARIANTS["jadore801120_prj_all"],
    "tunz": VARIANTS["tunz"],
    "opennmt_rotary": VARIANTS["opennmt_rotary"],
    "opennmt_alibi": VARIANTS["opennmt_alibi"],
    "opennmt_t5": VARIANTS["opennmt_t5"],
    "opennmt_grouped": GROUPED_QUERIES,
    "double_projection": DOUBLE_PROJECTION_LAYERS,
    "torch": VARIANTS["torch_post"],
    "t5": VARIANTS["t5"],
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change, and the expected diagnosis."""

    cause: str | None
    """None: no known cause."""
    site: str
    change: Change
    says: str = ""
    """A pattern that the explanation must contain, such as numbers."""


ENCODER, DECODER = "encoder.layers.0", "decoder.layers.1"
IN_ENCODER, IN_DECODER = "encoder/layers/0", "decoder/layers/1"
FIRST_NORM, FIRST_ATTENTION = f"{ENCODER}.sublayer.0.norm", f"{ENCODER}.self_attn"
LAST_ATTENTION = f"{DECODER}.self_attn"
SCORES, DECODER_SCORES = (
    f"{IN_ENCODER}/self_attention/scores",
    f"{IN_DECODER}/self_attention/scores",
)

ANNOTATED = [
    Mutation(
        "embedding scale",
        "target/embedding",
        with_output("tgt_embed.0", lambda _, y, x: 0.7 * y),
        "is 2.8 in the reference, 4 in ours",
    ),
    Mutation(
        "shifted tokens",
        "target/embedding",
        with_output("tgt_embed.0", lambda _, y, x: y.roll(-1, 1)),
        "to the left",
    ),
    Mutation(
        "reversed tokens",
        "source/embedding",
        with_output("src_embed.0", lambda _, y, x: y.flip(1)),
    ),
    Mutation("positions missing", "source/embedded", with_forward("src_embed.1", lambda _, x: x)),
    Mutation(
        "positions scale",
        "source/embedded",
        with_forward("src_embed.1", positions(scale=4.0)),
        "by 4, ours",
    ),
    Mutation(
        "sine base",
        "target/embedded",
        with_forward("tgt_embed.1", positions(base=777.0)),
        "base is 777, ours 1000",
    ),
    Mutation(
        "precision",
        "source/embedded",
        lambda module: module.src_embed[1].pe.copy_(module.src_embed[1].pe.float()),
    ),
    Mutation(
        "sine layout",
        "source/embedded",
        with_forward("src_embed.1", positions(layout="concatenated")),
        "layout is concatenated",
    ),
    Mutation(
        "sine exponent",
        "source/embedded",
        with_forward("src_embed.1", positions(exponent="tensor2tensor")),
        "exponent is tensor2tensor",
    ),
    Mutation(
        "logarithm base",
        "source/embedded",
        with_forward("src_embed.1", positions(base=math.exp(math.log10(1000)))),
        r"base is 20.0855, ours 1000: a logarithm to the base 10 in exp\(\)",
    ),
    Mutation(
        "precision",
        "target/embedded",
        lambda module: module.tgt_embed[1].pe.copy_(module.tgt_embed[1].pe.half()),
    ),
    Mutation(
        "position offset",
        "target/embedded",
        with_forward("tgt_embed.1", positions(offset=1)),
        "offset is 1, ours 0",
    ),
    Mutation(
        "position counting",
        "source/embedded",
        with_forward("src_embed.1", lambda self, x: x + self.pe[0, : len(x), None]),
        "count sentences of the batch",
    ),
    Mutation(
        "norm epsilon",
        f"{IN_DECODER}/cross_attention_norm",
        with_values(f"{DECODER}.sublayer.1.norm", eps=3.7e-4),
        "epsilon 0.00037 .* ours has epsilon 1e-06",
    ),
    Mutation(
        "biased variance",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward(
            FIRST_NORM, norm(lambda x: (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
        ),
        "1e-05 inside the root .* over n; ours has epsilon 1e-06 outside the root .* over n - 1",
    ),
    Mutation(
        "root-mean-square norm",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward(
            FIRST_NORM,
            norm(lambda x: (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), centre=False),
        ),
    ),
    Mutation(
        "precision",
        f"{IN_ENCODER}/feed_forward_norm",
        with_forward(f"{ENCODER}.sublayer.1.norm", narrow_statistics),
        "in float32",
    ),
    Mutation(
        "norm position",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward(f"{ENCODER}.sublayer.0", post_norm),
        "post-norm",
    ),
    Mutation("norm missing", "encoder/final_norm", with_forward("encoder.norm", lambda _, x: x)),
    Mutation("norm missing", "decoder/layers/0/cross_attention/key", unnormalised_memory),
    Mutation(
        "bias added twice",
        f"{IN_ENCODER}/feed_forward/output",
        with_output(f"{ENCODER}.feed_forward.w_2", lambda self, y, x: y + self.bias),
    ),
    Mutation(
        "transposed matrix",
        f"{IN_ENCODER}/self_attention/output",
        with_forward(f"{FIRST_ATTENTION}.linears.3", lambda self, x: x @ self.weight + self.bias),
    ),
    Mutation(
        "wrong weights",
        f"{IN_ENCODER}/self_attention/key",
        borrowed(f"{FIRST_ATTENTION}.linears.1", f"{FIRST_ATTENTION}.linears.2"),
        "uses encoder/layers/self_attention/value/",
    ),
    Mutation(
        "wrong weights",
        f"{IN_DECODER}/cross_attention/value",
        borrowed(f"{DECODER}.src_attn.linears.2", f"{LAST_ATTENTION}.linears.2"),
        r"uses decoder/layers/self_attention/value/\w+\[1\], ours .*cross_attention/value",
    ),
    Mutation(
        "wrong weights",
        f"{IN_DECODER}/cross_attention/query",
        source_attention_by("decoder.layers.0.src_attn"),
        r"uses decoder/layers/cross_attention/.*\[0\], ours .*\[1\], and \d more",
    ),
    Mutation(
        "exchanged operands", SCORES, with_forward(FIRST_ATTENTION, attention(project=(1, 0, 2)))
    ),
    Mutation("attention scale", DECODER_SCORES, with_values(LAST_ATTENTION, d_k=16), "is 0.25 in"),
    Mutation(
        "head order",
        SCORES,
        with_forward(FIRST_ATTENTION, attention(split=by_feature)),
        r"\(feature, head\)",
    ),
    Mutation(
        "missing padding mask",
        SCORES,
        with_forward(FIRST_ATTENTION, attention(hide=masked_by(everything))),
    ),
    Mutation(
        "missing causal mask",
        DECODER_SCORES,
        with_forward(LAST_ATTENTION, attention(hide=masked_by(keys_that_are_real))),
    ),
    Mutation(
        "causal mask off by one",
        DECODER_SCORES,
        with_forward(LAST_ATTENTION, attention(hide=masked_by(lambda mask: mask.tril(-1)))),
        "shifted by one",
    ),
    Mutation(
        "inverted mask",
        f"{IN_DECODER}/cross_attention/scores",
        with_forward(f"{DECODER}.src_attn", attention(hide=masked_by(torch.logical_not))),
    ),
    Mutation(
        "mask value",
        SCORES,
        with_forward(
            FIRST_ATTENTION, attention(hide=lambda scores, mask: scores.masked_fill(~mask, -12.0))
        ),
        "replaced by -12 .* by -inf here",
    ),
    Mutation(
        "mask sign",
        DECODER_SCORES,
        with_forward(LAST_ATTENTION, attention(hide=lambda scores, mask: scores + ~mask * 1e9)),
        r"increased by 1e\+09",
    ),
    Mutation(
        "precision",
        SCORES,
        with_forward(
            FIRST_ATTENTION,
            attention(hide=lambda scores, mask: scores.masked_fill(~mask, -1e9).float().double()),
        ),
    ),
    Mutation(
        "softmax axis",
        f"{IN_ENCODER}/self_attention/weights",
        with_forward(FIRST_ATTENTION, attention(axis=-2)),
        "over axis 2",
    ),
    Mutation(
        "head order",
        f"{IN_ENCODER}/self_attention/context",
        with_forward(FIRST_ATTENTION, attention(join=lambda x: x.reshape(len(x), x.shape[2], -1))),
        "without a transpose",
    ),
    Mutation(
        "residual missing",
        f"{IN_ENCODER}/self_attention_sum",
        with_forward(f"{ENCODER}.sublayer.0", lambda self, x, f: f(self.norm(x))),
    ),
    Mutation(
        "norm position",
        f"{IN_ENCODER}/self_attention_sum",
        with_forward(f"{ENCODER}.sublayer.0", lambda self, x, f: self.norm(x) + f(self.norm(x))),
        "applies the norm of .*self_attention_norm to source",
    ),
    Mutation(
        "residual scale",
        f"{IN_DECODER}/feed_forward_sum",
        with_output(f"{DECODER}.sublayer.2", lambda self, y, *_: y / math.sqrt(2)),
        "0.707107",
    ),
    Mutation(
        "dropout",
        f"{IN_ENCODER}/feed_forward/activated",
        with_output(f"{ENCODER}.feed_forward.dropout", dropped),
        "0.25",
    ),
    Mutation(
        "dropout",
        f"{IN_DECODER}/self_attention_sum",
        with_output(f"{DECODER}.sublayer.0.dropout", dropped),
        "1.33333",
    ),
    Mutation(
        "activation",
        f"{IN_ENCODER}/feed_forward/activated",
        with_forward(f"{ENCODER}.feed_forward", lambda self, x: self.w_2(F.gelu(self.w_1(x)))),
        "applies gelu to",
    ),
    Mutation(
        "bias missing", "logits", with_output("generator.proj", lambda self, y, x: y - self.bias)
    ),
    Mutation(
        "softmax in the output",
        "logits",
        with_output("generator", lambda _, y, x: y.log_softmax(-1)),
        "log-probabilities",
    ),
    Mutation(
        "logit scale",
        "logits",
        with_output("generator", lambda _, y, x: y / 4),
        "by 0.25, ours",
    ),
]


def in_order(*order: int) -> Change:
    """Runs the encoder's layers in another order."""

    def forward(self, x, mask):
        for index in order:
            x = self.layers[index](x, mask)
        return self.norm(x)

    return with_forward("encoder", forward)


def weights_by(function: Callable[[Tensor], Tensor]) -> Change:
    """Changes the attention weights of the first layer before they are applied."""
    return with_forward(FIRST_ATTENTION, attention(between=function))


def keys_for_values(self, query, key, value, mask):
    """`annotated`'s attention, which sums keys up."""
    q, k, _ = (
        split_heads(linear(x), self.h)
        for linear, x in zip(self.linears, (query, key, value), strict=False)
    )
    scores = (q @ k.transpose(-2, -1) / math.sqrt(self.d_k)).masked_fill(~mask.unsqueeze(1), -1e9)
    return self.linears[3](join_heads(scores.softmax(-1) @ k)), scores


def memory_of(part: str) -> Change:
    """Makes the decoder attend to the output of another part than the encoder."""

    def change(module: nn.Module) -> None:
        kept = []
        module.get_submodule(part).register_forward_hook(lambda self, x, y: kept.append(y))
        module.decoder.register_forward_pre_hook(
            lambda self, inputs: (*inputs[:2], kept.pop(), inputs[3])
        )

    return change


KEY, CONTEXT = "decoder/layers/0/cross_attention/key", f"{IN_ENCODER}/self_attention/context"
MORE_ANNOTATED = [
    Mutation("wrong weights", "target/embedding", borrowed("tgt_embed.0", "src_embed.0"), "looks"),
    Mutation(
        "zeroed tokens",
        "source/embedding",
        with_output("src_embed.0", lambda _, y, x: y.masked_fill((x == x[0, 0])[..., None], 0)),
    ),
    Mutation(
        "shifted tokens",
        "target/embedding",
        with_output("tgt_embed.0", lambda _, y, x: F.pad(y, (0, 0, 1, 0))[:, :-1]),
        "after a zero vector",
    ),
    Mutation("averaged weights", CONTEXT, weights_by(lambda w: w.mean(1, True).expand_as(w))),
    Mutation("transposed weights", CONTEXT, weights_by(lambda w: w.transpose(2, 3))),
    Mutation("wrong input", CONTEXT, with_forward(FIRST_ATTENTION, keys_for_values), "key here"),
    Mutation("wrong input", KEY, memory_of("src_embed.1"), "reads source/embedded here"),
    Mutation(
        "different bias",
        "logits",
        with_output("generator.proj", lambda _, y, x: y + torch.linspace(-1, 1, y.shape[-1])),
        "1 at",
    ),
    Mutation(
        "activation added",
        f"{IN_ENCODER}/feed_forward_sum",
        with_output(f"{ENCODER}.feed_forward", lambda self, y, x: y.relu()),
        "applies relu",
    ),
    Mutation(
        "sub-layer missing",
        f"{IN_ENCODER}/feed_forward_sum",
        with_output(f"{ENCODER}.feed_forward", lambda self, y, x: 0 * y),
    ),
    Mutation(
        "sine layout and sine exponent",
        "source/embedded",
        with_forward("src_embed.1", positions(layout="concatenated", exponent="tensor2tensor")),
    ),
    Mutation("skipped layer", "encoder/layers/2/self_attention_norm", in_order(0, 1)),
    Mutation("skipped layer", "encoder/layers/1/self_attention_norm", in_order(0, 2)),
    Mutation("repeated layer", "encoder/layers/1/self_attention_norm", in_order(0, 0, 1, 2)),
    Mutation("layer order", "encoder/layers/1/self_attention_norm", in_order(0, 2, 1)),
    Mutation(
        "sub-layer order",
        "encoder/layers/1/self_attention_norm",
        with_forward("encoder.layers.1", feed_forward_first),
    ),
    Mutation("another layer", KEY, memory_of_layer(None), "encoder/layers/0 here"),
    *(
        Mutation("different weights", site, with_output(part, changed_weight), r"0.01 at \[3, 5\]")
        for part, site in [
            (f"{FIRST_ATTENTION}.linears.1", f"{IN_ENCODER}/self_attention/key"),
            (f"{DECODER}.src_attn.linears.3", f"{IN_DECODER}/cross_attention/output"),
            (f"{DECODER}.feed_forward.w_1", f"{IN_DECODER}/feed_forward/hidden"),
            ("generator.proj", "logits"),
        ]
    ),
    *(
        Mutation(None, site, with_output(part, lambda self, y, *_: y + 0.1 * y.sin()))
        for part, site in [
            ("src_embed.0", "source/embedding"),
            (FIRST_NORM, f"{IN_ENCODER}/self_attention_norm"),
            (f"{DECODER}.self_attn.linears.0", f"{IN_DECODER}/self_attention/query"),
            (f"{DECODER}.feed_forward.dropout", f"{IN_DECODER}/feed_forward/activated"),
            (f"{DECODER}.sublayer.2", f"{IN_DECODER}/feed_forward_sum"),
        ]
    ),
]

JADORE801120 = [
    Mutation(
        "biased variance",
        f"{IN_DECODER}/feed_forward_norm",
        with_forward(
            "decoder.layer_stack.1.pos_ffn.layer_norm",
            lambda self, x: (
                self.weight
                * (x - x.mean(-1, keepdim=True))
                / (x.var(-1, keepdim=True) + self.eps).sqrt()
                + self.bias
            ),
        ),
        "over n - 1; ours has .* over n",
    ),
    Mutation(
        "precision",
        "decoder/embedding_norm",
        with_forward("decoder.layer_norm", narrow_norm),
        "float32",
    ),
    Mutation(
        "norm position",
        f"{IN_ENCODER}/self_attention/query",
        with_forward("encoder.layer_stack.0.slf_attn", pre_norm),
        "applies the norm of",
    ),
    Mutation(
        "wrong weights",
        f"{IN_DECODER}/cross_attention/query",
        with_forward("decoder.layer_stack.1", attends_by_self_attention),
        r"uses decoder/layers/self_attention.*\[1\], ours .*, and \d more like it",
    ),
    # Its translator builds the model without the scale that training used.
    Mutation(
        "logit scale",
        "logits",
        with_values("", logit_scale=1.0),
        "is 1 in the reference, 0.25 in ours",
    ),
]


def with_sinusoids(**switches: str) -> Change:
    """Replaces the positional encoding of tunz by our table."""
    return with_values(
        "",
        get_position_encoding=lambda tokens: torch.tensor(
            sinusoidal_table(tokens.shape[1], 16, **switches)
        ),
    )


TUNZ = [
    Mutation(
        "sine layout",
        "source/embedded",
        with_sinusoids(exponent="tensor2tensor"),
        "layout is interleaved, ours concatenated",
    ),
    Mutation(
        "sine exponent",
        "source/embedded",
        with_sinusoids(layout="concatenated"),
        "exponent is paper, ours tensor2tensor",
    ),
    Mutation(
        "precision",
        "source/embedded",
        lambda module: module.inv_timescales.copy_(module.inv_timescales.float()),
    ),
]

DOUBLE_PROJECTION = [
    # As published: heads are put together along the batch axis.
    Mutation(
        "head order",
        f"{IN_ENCODER}/self_attention/context",
        with_values("encoder.0.self_attention", published_head_join=True),
        "along the batch",
    ),
    Mutation(
        "different bias",
        "decoder/layers/0/cross_attention/key",
        with_output("decoder.0.cross_attention.attention.W_k", lambda self, y, *_: y - self.bias),
        "another vector",
    ),
]

OPENNMT_ENCODER = "encoder.transformer.0.self_attn"
OPENNMT_DECODER = "decoder.transformer_layers.1.self_attn"


def with_slopes(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Changes the slopes [H, 1, 1] of an ALiBi bias."""

    def change_slopes(module: nn.Module) -> None:
        alibi = module.get_submodule(f"{part}.alibi")
        alibi.slopes = change(alibi.slopes)

    return change_slopes


ROTARY = [
    Mutation(
        "rotation layout",
        SCORES,
        with_values(OPENNMT_ENCODER, rotary_interleave=False),
        "pairs of halves, ours pairs of neighbors",
    ),
    Mutation(
        "rotation base",
        DECODER_SCORES,
        with_values(OPENNMT_DECODER, rotary_theta=500000.0),
        "is 500000, ours 10000",
    ),
    Mutation("rotation missing", SCORES, with_values(OPENNMT_ENCODER, position_kind="none")),
]

ALIBI = [
    Mutation(
        "slope order",
        SCORES,
        with_slopes(OPENNMT_ENCODER, lambda slopes: slopes.sort(dim=0, descending=True)[0]),
        "in decreasing order",
    ),
    Mutation(
        "slope values",
        DECODER_SCORES,
        with_slopes(
            OPENNMT_DECODER,
            lambda slopes: 2.0 ** (-8 * torch.arange(1, 7, dtype=slopes.dtype)[:, None, None] / 6),
        ),
        r"2\^\(-8h/H\) for all heads",
    ),
    Mutation(
        "slope values",
        SCORES,
        with_slopes(OPENNMT_ENCODER, lambda slopes: slopes * torch.arange(1, 7)[:, None, None]),
        r"are \(0.25, 0.125, ",
    ),
    Mutation(
        "position bias missing", DECODER_SCORES, with_values(OPENNMT_DECODER, position_kind="none")
    ),
]

T5 = [
    Mutation(
        "bucket rule",
        SCORES,
        with_values(OPENNMT_ENCODER, is_decoder=True),
        "bidirectional=False in place of True",
    ),
    Mutation(
        "bucket rule",
        DECODER_SCORES,
        with_values(OPENNMT_DECODER, max_relative_positions=10),
        "max_distance=10 in place of 5",
    ),
    Mutation("position bias missing", SCORES, with_values(OPENNMT_ENCODER, position_kind="none")),
    Mutation(
        "place of a scale",
        DECODER_SCORES,
        lambda module: module.get_submodule(OPENNMT_DECODER).register_forward_pre_hook(
            lambda self, inputs: setattr(
                self, "position_bias", lambda length: type(self).position_bias(self, length) / 2
            )
        ),
        "scales the sum",
    ),
]


def tiled(x: Tensor) -> Tensor:
    """2 heads of keys or values for 4 of queries, head h % 2 for query head h."""
    return torch.cat([x, x], dim=1)


def with_tiled_values(module: nn.Module) -> None:
    """Tiles the heads of values, in attention that repeats those of keys."""
    part = module.get_submodule(OPENNMT_DECODER)
    functions = itertools.cycle([part.shared, tiled])  # Keys are first.
    part.shared = lambda x: next(functions)(x)


GROUPED = [
    Mutation(
        "repeated heads",
        SCORES,
        with_values(OPENNMT_ENCODER, shared=tiled),
        r"h % G in the reference, h // \(H/G\) in ours",
    ),
    Mutation(
        "repeated heads",
        f"{IN_DECODER}/cross_attention/scores",
        with_values("decoder.transformer_layers.1.context_attn", shared=tiled),
    ),
    Mutation("repeated heads", f"{IN_DECODER}/self_attention/context", with_tiled_values),
]

TORCH = [
    Mutation(
        "activation",
        f"{IN_DECODER}/feed_forward/activated",
        with_values("transformer.decoder.layers.1", activation=F.silu),
        "applies silu to",
    ),
]

T5_MODULE = [
    # As published: its reference has float64 norms in float64.
    Mutation(
        "precision",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward("encoder.block.0.layer.0.layer_norm", T5LayerNorm.forward),
        "in float32",
    ),
    Mutation(
        "norm epsilon",
        f"{IN_ENCODER}/self_attention_norm",
        with_values("encoder.block.0.layer.0.layer_norm", variance_epsilon=1e-3),
        "epsilon 0.001 .* ours has epsilon 1e-06",
    ),
    Mutation("logit scale", "logits", with_output("lm_head", lambda self, y, x: 4 * y)),
]

EVERY_CASE = [
    (family, mutation)
    for family, mutations in {
        "annotated": [*ANNOTATED, *MORE_ANNOTATED],
        "jadore801120": JADORE801120,
        "tunz": TUNZ,
        "opennmt_rotary": ROTARY,
        "opennmt_alibi": ALIBI,
        "opennmt_t5": T5,
        "opennmt_grouped": GROUPED,
        "double_projection": DOUBLE_PROJECTION,
        "torch": TORCH,
        "t5": T5_MODULE,
    }.items()
    for mutation in mutations
]
_FIRST_OF_CAUSE = {mutation.cause: mutation for _, mutation in reversed(EVERY_CASE)}
_QUICK = [each for each in ANNOTATED if _FIRST_OF_CAUSE[each.cause] is each][2::3]
CASES = [
    pytest.param(
        family,
        mutation,
        id=f"{family}-{mutation.cause}-{mutation.site}",
        marks=() if family == "annotated" and mutation in _QUICK else pytest.mark.slow,
    )
    for family, mutation in EVERY_CASE
]
"""Mutations of references; by default, one of every third cause that the first family can have.

`test_thirty_faults.py` has those of a function that is no Transformer of ours.
"""
