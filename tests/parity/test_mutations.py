"""Small changes of a reference, whose site and cause the comparison must report.

A mutation is injected into a PyTorch reference of `parity/references`; the comparison only gets the
changed module.
"""

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy_references import DOUBLE_PROJECTION as DOUBLE_PROJECTION_LAYERS
from toy_references import VARIANTS

from flaxformer_mt import interop, parity
from flaxformer_mt.model.positions import sinusoidal_table
from flaxformer_mt.parity import references
from flaxformer_mt.parity.diagnosis.causes import CAUSES, Candidate, SuspectSite, candidates
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs
from flaxformer_mt.parity.diagnosis.operations.attention import Softmax
from flaxformer_mt.parity.diagnosis.operations.base import Given
from flaxformer_mt.parity.diagnosis.site_operations import operation
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.references import losses
from flaxformer_mt.parity.references.common import join_heads, not_future, split_heads

FAMILIES = {
    "annotated": VARIANTS["annotated_1000"],
    "jadore801120": VARIANTS["jadore801120_prj_all"],
    "tunz": VARIANTS["tunz"],
    "opennmt_rotary": VARIANTS["opennmt_rotary"],
    "opennmt_alibi": VARIANTS["opennmt_alibi"],
    "opennmt_t5": VARIANTS["opennmt_t5"],
    "double_projection": DOUBLE_PROJECTION_LAYERS,
}

Change = Callable[[nn.Module], object]
"""Injects a mutation into a module."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change, and the expected diagnosis."""

    cause: str
    site: str
    change: Change
    says: str = ""
    """A pattern that the explanation must contain, such as numbers."""


# Changes of a module


def with_values(part: str, **values: Any) -> Change:
    """Sets attributes of a sub-module."""

    def change(module: nn.Module) -> None:
        for name, value in values.items():
            setattr(module.get_submodule(part), name, value)

    return change


def with_output(part: str, function: Callable[..., Any]) -> Change:
    """Replaces the output of a sub-module by function(sub-module, its output, *its inputs)."""

    def change(module: nn.Module) -> None:
        module.get_submodule(part).register_forward_hook(
            lambda self, inputs, output: function(self, output, *inputs)
        )

    return change


def with_forward(part: str, function: Callable[..., Any]) -> Change:
    """Replaces the forward function of a sub-module by function(sub-module, *its inputs)."""

    def change(module: nn.Module) -> None:
        found = module.get_submodule(part)
        found.forward = functools.partial(function, found)

    return change


def positions(scale: float = 1.0, **switches: Any) -> Callable[..., Tensor]:
    """The forward of `annotated`'s PositionalEncoding with another table."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        length, d_model = x.shape[1:]
        table = sinusoidal_table(length, d_model, **{"base": 1000.0} | switches)
        return x + scale * torch.tensor(table)

    return forward


def norm(divisor: Callable[[Tensor], Tensor], centre: bool = True) -> Callable[..., Tensor]:
    """The forward of `annotated`'s LayerNorm with another divisor."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if centre else x
        return self.a_2 * centred / divisor(centred) + self.b_2

    return forward


def attention(
    split: Callable[[Tensor, int], Tensor] = split_heads,
    hide: Callable[[Tensor, Tensor], Tensor] = lambda scores, mask: scores.masked_fill(~mask, -1e9),
    axis: int = -1,
    join: Callable[[Tensor], Tensor] = join_heads,
    project: tuple[int, ...] = (0, 1, 2),
    between: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Callable[..., Tensor]:
    """The forward of `annotated`'s MultiHeadedAttention with one change."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        inputs = zip(project, (query, key, value), strict=True)
        q, k, v = (split(self.linears[index](x), self.h) for index, x in inputs)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        self.attn = hide(scores, mask.unsqueeze(1)).softmax(dim=axis)
        return self.linears[3](join(between(self.attn) @ v))

    return forward


def by_feature(x: Tensor, heads: int) -> Tensor:
    """[B, T, K*H] to [B, H, T, K]."""
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def masked_by(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Masks with a function of the correct mask."""
    return lambda scores, right: scores.masked_fill(~mask(right), -1e9)


def everything(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


def keys_that_are_real(mask: Tensor) -> Tensor:
    """The padding mask alone: that of the last query, which attends to all earlier tokens."""
    return mask[:, :, -1:].expand_as(mask)


def unnormalised_memory(module: nn.Module) -> None:
    """Makes the decoder attend to the input of the encoder's final norm."""
    kept = []
    module.encoder.norm.register_forward_hook(lambda self, inputs, output: kept.append(inputs[0]))
    module.decoder.register_forward_pre_hook(
        lambda self, inputs: (inputs[0], kept.pop(), *inputs[2:])
    )


def borrowed(part: str, lender: str) -> Change:
    """Makes a sub-module use the weights of another one."""

    def change(module: nn.Module) -> None:
        module.get_submodule(part).forward = module.get_submodule(lender).forward

    return change


def all_of(*changes: Change) -> Change:
    """Several changes at once."""
    return lambda module: [change(module) for change in changes]


# The bug of the study notes, in a decoder that has a `src_attn` and never uses it.
source_attention_by_self_attention = all_of(
    *(
        borrowed(f"{layer}.src_attn.linears.{index}", f"{layer}.self_attn.linears.{index}")
        for layer in ("decoder.layers.0", "decoder.layers.1")
        for index in range(4)
    )
)


def post_norm(self: Any, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """`annotated`'s SublayerConnection as in the paper."""
    return self.norm(x + sublayer(x))


def pre_norm(self: Any, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`jadore801120`'s MultiHeadAttention as x + f(norm(x))."""
    y = self.layer_norm(x)
    q, k, v = (split_heads(w(y), self.n_head) for w in (self.w_qs, self.w_ks, self.w_vs))
    context, weights = self.attention(q, k, v, mask.unsqueeze(1))
    return x + self.fc(join_heads(context)), weights


def dropped(self: nn.Module, output: Tensor, *inputs: Tensor) -> Tensor:
    """Active dropout."""
    torch.manual_seed(0)
    return F.dropout(output, 0.25)


def changed_weight(self: nn.Module, output: Tensor, x: Tensor) -> Tensor:
    """As if the weight from input 3 to output 5 were larger by 0.01."""
    change = torch.zeros_like(output)
    change[..., 5] = 0.01 * x[..., 3]
    return output + change


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
        "source/embedding",
        with_values("src_embed.0", d_model=1),
        "by 1, ours by 4",
    ),
    Mutation(
        "embedding scale",
        "target/embedding",
        with_output("tgt_embed.0", lambda _, y, x: 0.7 * y),
        "by 2.8, ours by 4",
    ),
    Mutation(
        "shifted tokens",
        "target/embedding",
        with_output("tgt_embed.0", lambda _, y, x: y.roll(-1, 1)),
        "to the left",
    ),
    Mutation("positions missing", "source/embedded", with_forward("src_embed.1", lambda _, x: x)),
    Mutation(
        "positions scaled",
        "source/embedded",
        with_forward("src_embed.1", positions(scale=4.0)),
        r"sqrt\(D\)",
    ),
    Mutation(
        "sine base",
        "source/embedded",
        with_forward("src_embed.1", positions(base=10000.0)),
        "base is 10000, ours 1000",
    ),
    Mutation(
        "sine base",
        "target/embedded",
        with_forward("tgt_embed.1", positions(base=777.0)),
        "base is 777, ours 1000",
    ),
    Mutation(
        "float32 positions",
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
        f"{IN_ENCODER}/self_attention_norm",
        with_values(FIRST_NORM, eps=1e-5),
        "epsilon 1e-05 .* ours 1e-06",
    ),
    Mutation(
        "norm epsilon",
        f"{IN_DECODER}/cross_attention_norm",
        with_values(f"{DECODER}.sublayer.1.norm", eps=3.7e-4),
        "epsilon 0.00037 .* ours 1e-06",
    ),
    Mutation(
        "biased variance",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward(
            FIRST_NORM, norm(lambda x: (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt())
        ),
        "1e-05 inside the root .* over n, ours 1e-06 outside the root .* over n - 1",
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
        "norm bias missing",
        f"{IN_ENCODER}/feed_forward_norm",
        with_output(f"{ENCODER}.sublayer.1.norm", lambda self, y, x: y - self.b_2),
    ),
    Mutation(
        "norm position",
        f"{IN_ENCODER}/self_attention_norm",
        with_forward(f"{ENCODER}.sublayer.0", post_norm),
        "post-norm",
    ),
    Mutation(
        "final norm missing", "encoder/final_norm", with_forward("encoder.norm", lambda _, x: x)
    ),
    Mutation("final norm missing", "decoder/layers/0/cross_attention/key", unnormalised_memory),
    Mutation(
        "bias missing",
        f"{IN_DECODER}/self_attention/value",
        with_output(f"{LAST_ATTENTION}.linears.2", lambda self, y, x: y - self.bias),
    ),
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
        "wrong projection",
        f"{IN_ENCODER}/self_attention/key",
        borrowed(f"{FIRST_ATTENTION}.linears.1", f"{FIRST_ATTENTION}.linears.2"),
        "the value weights",
    ),
    Mutation(
        "wrong layer",
        "encoder/layers/1/feed_forward/hidden",
        borrowed("encoder.layers.1.feed_forward.w_1", f"{ENCODER}.feed_forward.w_1"),
        "encoder layer 0",
    ),
    Mutation(
        "wrong attention",
        "decoder/layers/0/cross_attention/query",
        source_attention_by_self_attention,
        "of self_attention in decoder layer 0",
    ),
    Mutation(
        "swapped query and key", SCORES, with_forward(FIRST_ATTENTION, attention(project=(1, 0, 2)))
    ),
    Mutation("attention scale", SCORES, with_values(FIRST_ATTENTION, d_k=1), "by 1, ours"),
    Mutation(
        "attention scale", DECODER_SCORES, with_values(LAST_ATTENTION, d_k=16), "by 1 / K, ours"
    ),
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
        "from itself",
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
        "replaced by -12 .* by -inf in ours",
    ),
    Mutation(
        "mask sign",
        DECODER_SCORES,
        with_forward(LAST_ATTENTION, attention(hide=lambda scores, mask: scores + ~mask * 1e9)),
        r"increased by 1e\+09",
    ),
    Mutation(
        "float32 scores",
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
        "over queries",
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
        "normalized input",
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
        "is gelu, ours relu",
    ),
    Mutation(
        "activation",
        f"{IN_DECODER}/feed_forward/activated",
        with_forward(
            f"{DECODER}.feed_forward",
            lambda self, x: self.w_2(F.gelu(self.w_1(x), approximate="tanh")),
        ),
        "is gelu_tanh, ours relu",
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
        r"1 / sqrt\(D\), ours by 1",
    ),
]

JADORE801120 = [
    Mutation(
        "norm epsilon",
        "encoder/embedding_norm",
        with_values("encoder.layer_norm", eps=1e-5),
        "epsilon 1e-05 .* ours 1e-06",
    ),
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
        "over n - 1, ours .* over n",
    ),
    Mutation(
        "norm position",
        f"{IN_ENCODER}/self_attention/query",
        with_forward("encoder.layer_stack.0.slf_attn", pre_norm),
        "pre-norm",
    ),
    Mutation(
        "positions missing", "target/embedded", with_forward("decoder.position_enc", lambda _, x: x)
    ),
    # Its translator builds the model without the scale that training used.
    Mutation("logit scale", "logits", with_values("", logit_scale=1.0), "by 1, ours by 0.25"),
]

TUNZ = [
    Mutation(
        "embedding scale", "source/embedding", with_values("", emb_scale=16.0), "by D, ours by 4"
    ),
    Mutation(
        "sine layout",
        "source/embedded",
        with_values(
            "",
            get_position_encoding=lambda tokens: torch.tensor(
                sinusoidal_table(tokens.shape[1], 16, exponent="tensor2tensor")
            ),
        ),
        "layout is interleaved, ours concatenated",
    ),
    Mutation(
        "sine exponent",
        "source/embedded",
        with_values(
            "",
            get_position_encoding=lambda tokens: torch.tensor(
                sinusoidal_table(tokens.shape[1], 16, layout="concatenated")
            ),
        ),
        "exponent is paper, ours tensor2tensor",
    ),
    Mutation(
        "float32 positions",
        "source/embedded",
        lambda module: module.inv_timescales.copy_(module.inv_timescales.float()),
    ),
    Mutation(
        "attention scale",
        f"{IN_DECODER}/cross_attention/scores",
        with_values("decoder.layers.1.enc_dec_attention", scale=1.0),
        "by 1, ours",
    ),
    Mutation(
        "final norm missing",
        "decoder/final_norm",
        with_forward("decoder.last_norm", lambda _, x: x),
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
    # Nothing is known of what goes into the first layers.
    Mutation(
        "bias missing",
        f"{IN_ENCODER}/feed_forward/hidden",
        with_output("encoder.0.feed_forward.0", lambda self, y, x: y - self.bias),
    ),
    Mutation(
        "different weights",
        "decoder/layers/0/cross_attention/key",
        with_output("decoder.0.cross_attention.attention.W_k", lambda self, y, *_: y - self.bias),
        "another bias",
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
        "is concatenated, ours interleaved",
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
        "position bias scale",
        DECODER_SCORES,
        lambda module: module.get_submodule(OPENNMT_DECODER).register_forward_pre_hook(
            lambda self, inputs: setattr(
                self, "position_bias", lambda length: type(self).position_bias(self, length) / 2
            )
        ),
        r"divides .* by sqrt\(K\)",
    ),
]

CASES = [
    pytest.param(family, mutation, id=f"{family}-{mutation.cause}-{mutation.site}")
    for family, mutations in {
        "annotated": ANNOTATED,
        "jadore801120": JADORE801120,
        "tunz": TUNZ,
        "opennmt_rotary": ROTARY,
        "opennmt_alibi": ALIBI,
        "opennmt_t5": T5,
        "double_projection": DOUBLE_PROJECTION,
    }.items()
    for mutation in mutations
]


# The diagnosis


@functools.cache
def example(family: str) -> parity.Tokens:
    variant = FAMILIES[family]
    config, _ = interop.load(variant.family, variant.build("float64").state_dict(), **variant.hints)
    return parity.example(config, rows=6)


def compared(family: str, change: Change = lambda module: None, **options: Any) -> parity.Report:
    """The report on a changed reference in float64, on a padded batch."""
    variant = FAMILIES[family]
    module = variant.build("float64")
    change(module)
    batch = options.pop("batch", None) or example(family)
    return parity.compare(variant.family, module, batch, **variant.hints, **options)


def check(report: parity.Report, site: str, cause: str, says: str = "") -> None:
    """The first difference is at the site, and has that name."""
    assert report.first_divergence is not None
    assert report.first_divergence.site == site
    assert report.diagnosis is not None
    assert report.diagnosis.cause == cause, report.diagnosis
    assert re.search(says, report.diagnosis.explanation), report.diagnosis
    assert report.diagnosis.residual <= 1e-10


@pytest.mark.parametrize(("family", "mutation"), CASES)
def test_a_mutation_is_found_and_named(family, mutation):
    check(compared(family, mutation.change), mutation.site, mutation.cause, mutation.says)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_reference_has_no_diagnosis(family):
    report = compared(family)
    assert report.passed, report.first_divergence
    assert report.diagnosis is None


def test_layers_alone_of_which_only_the_results_are_tapped():
    taps = {IN_ENCODER: parity.Tap("encoder.0")}
    change = with_values("encoder.0.norm2", eps=1e-3)
    check(
        compared("double_projection", change, taps=taps),
        IN_ENCODER,
        "norm epsilon",
        "epsilon 0.001",
    )


def test_what_stands_at_padding_is_not_compared():
    """PyTorch's fast path gives zeros there, see `test_published_bugs.py`."""
    padding = torch.tensor(example("annotated").source == 0)[..., None]
    change = with_output("encoder.norm", lambda self, y, x: y.masked_fill(padding, 0))
    assert padding.any()
    assert compared("annotated", change).passed


def test_a_positional_encoding_in_place_of_the_feed_forward_network():
    """The published `make_model` of `annotated_wide_heads`, with the layers of `annotated`."""
    network = f"{IN_ENCODER}/feed_forward"
    taps = annotated_taps()
    del taps[f"{network}/hidden"], taps[f"{network}/activated"]
    taps[f"{network}/output"] = parity.Tap(f"{ENCODER}.feed_forward")
    change = with_forward(f"{ENCODER}.feed_forward", positions())
    report = compared("annotated", change, taps=taps)
    check(report, f"{network}/output", "feed-forward replaced", "a positional encoding")


def test_a_mask_that_ignores_padding_of_the_target():
    """As in the published translator of `jadore801120`; it shows with padding on the left."""
    source, target_input, target_output = example("jadore801120")
    lengths = (target_output != 0).sum(axis=1)
    moved = [
        np.stack([np.roll(row, 6 - n) for row, n in zip(array, lengths, strict=True)])
        for array in (target_input, target_output)
    ]

    def without_padding_mask(module: nn.Module) -> None:
        module.decoder.register_forward_pre_hook(
            lambda self, inputs: (inputs[0], not_future(inputs[0]), *inputs[2:])
        )

    report = compared("jadore801120", without_padding_mask, batch=(source, *moved))
    check(report, "decoder/layers/0/self_attention/scores", "missing padding mask")


def test_another_label_smoothing():
    theirs = dataclasses.replace(recipe("jadore801120"), loss=losses.torch_cross_entropy)
    report = compared("jadore801120", recipe=theirs)
    check(report, "loss", "label-smoothing convention", "uniform in place of others")


# References with few taps


def annotated_taps() -> dict[str, parity.Tap]:
    variant = FAMILIES["annotated"]
    module = variant.build("float64")
    config, _ = interop.load("annotated", module.state_dict(), **variant.hints)
    return references.taps("annotated", config, module)


def layer_taps() -> dict[str, parity.Tap]:
    """Only the taps of the layers' outputs."""
    return {site: tap for site, tap in annotated_taps().items() if re.search(r"/\d$", site)}


# Without a tap at the site itself, constants cannot be solved for.
SOLVED = ("dropout", "mask value", "float32 scores")


@pytest.mark.parametrize(
    "mutation",
    [m for m in ANNOTATED if IN_ENCODER in m.site and m.cause not in SOLVED],
    ids=lambda mutation: mutation.cause,
)
def test_is_found_inside_a_layer_of_which_only_the_result_is_tapped(mutation):
    report = compared("annotated", mutation.change, taps=layer_taps())
    check(report, IN_ENCODER, mutation.cause, f"at {IN_ENCODER}/")


def test_the_same_mistake_in_every_norm_is_found_behind_all_of_them():
    norms = [f"{ENCODER}.sublayer.{index}.norm" for index in range(2)]
    change = all_of(*(with_values(norm, eps=1e-5) for norm in norms))
    report = compared("annotated", change, taps=layer_taps())
    check(report, IN_ENCODER, "norm epsilon", "epsilon 1e-05 .* ours 1e-06")


# The documentation


DOCS = Path(__file__).parents[2] / "docs"


def causes_of(inputs: DiagnosisInputs) -> set[str]:
    """The names of all causes that are tested anywhere in a model."""
    rng = np.random.default_rng(0)
    found = set()
    for name in [*inputs.ours, "loss"]:
        ours = inputs.ours.get(name, np.asarray(inputs.loss))
        # Some causes need a large difference, others that of rounding.
        for theirs in (ours + rng.normal(size=ours.shape), np.float64(np.float32(ours))):
            site = SuspectSite(inputs, name, theirs)
            found |= {each.cause for each in candidates(operation(inputs, name), site)}
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_causes_in_the_docs_are_those_that_are_tested(monkeypatch):
    captured = []

    def capture(inputs):
        captured.append(inputs)

    # The package has a function of the module's name.
    module = importlib.import_module("flaxformer_mt.parity.compare")
    monkeypatch.setattr(module, "diagnose", capture)
    parts = {
        "annotated": "src_embed.0",
        "jadore801120": "encoder.layer_norm",
        "opennmt_rotary": OPENNMT_ENCODER + ".linear_keys",
        "opennmt_alibi": OPENNMT_ENCODER + ".linear_keys",
        "opennmt_t5": OPENNMT_ENCODER + ".linear_keys",
    }
    for family, part in parts.items():
        compared(family, with_output(part, lambda self, y, *_: 2 * y))
    assert len(captured) == len(parts)
    tested = set().union(*map(causes_of, captured))
    text = (DOCS / "parity.md").read_text("utf-8")
    section = text[text.index("## Reading a diagnosis") : text.index("## float32 or float64")]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    documented = set(re.findall(r"`([^`]+)`", "".join(table)))
    assert documented <= tested
    # Some causes are two at once.
    assert [name for name in tested - documented if not {*name.split(" and ")} <= documented] == []


# Unknown causes


@pytest.mark.parametrize(
    ("part", "site"),
    [
        (f"{FIRST_ATTENTION}.linears.1", f"{IN_ENCODER}/self_attention/key"),
        (f"{DECODER}.src_attn.linears.3", f"{IN_DECODER}/cross_attention/output"),
        (f"{DECODER}.feed_forward.w_1", f"{IN_DECODER}/feed_forward/hidden"),
        ("generator.proj", "logits"),
    ],
)
def test_another_weight_is_found_where_it_is(part, site):
    report = compared("annotated", with_output(part, changed_weight))
    check(report, site, "different weights", r"0.01 at \[3, 5\]")


@pytest.mark.parametrize(
    ("part", "site"),
    [
        ("src_embed.0", "source/embedding"),
        (FIRST_NORM, f"{IN_ENCODER}/self_attention_norm"),
        (f"{DECODER}.self_attn.linears.0", f"{IN_DECODER}/self_attention/query"),
        (f"{DECODER}.feed_forward.dropout", f"{IN_DECODER}/feed_forward/activated"),
        (f"{DECODER}.sublayer.2", f"{IN_DECODER}/feed_forward_sum"),
    ],
)
def test_what_is_no_known_cause_is_found_and_not_named(part, site):
    report = compared("annotated", with_output(part, lambda self, y, *_: y + 0.1 * y.sin()))
    assert report.first_divergence is not None
    assert report.first_divergence.site == site
    assert report.diagnosis is None


def test_a_cause_of_ones_own(monkeypatch):
    def weights_squared(softmax, site):
        yield Candidate("squared", "the reference squares weights", Given(softmax.value() ** 2))

    change = with_forward(FIRST_ATTENTION, attention(between=lambda weights: weights**2))
    site = f"{IN_ENCODER}/self_attention/weights"
    taps = annotated_taps() | {site: parity.Tap(FIRST_ATTENTION, op="bmm", call=1, side="input")}
    assert compared("annotated", change, taps=taps).diagnosis is None
    monkeypatch.setitem(CAUSES, Softmax, [*CAUSES[Softmax], weights_squared])
    check(compared("annotated", change, taps=taps), site, "squared")
