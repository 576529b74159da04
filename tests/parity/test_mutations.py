"""Small changes of a reference, whose site and cause the comparison must report.

A mutation of `mutations.py` is injected into a PyTorch reference of `parity/references`; the
comparison only gets the changed module.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from module_changes import (
    Change,
    all_of,
    attention,
    changed_weight,
    feed_forward_first,
    memory_of_layer,
    positions,
    with_forward,
    with_output,
    with_values,
)
from mutations import (
    ANNOTATED,
    CASES,
    DECODER,
    ENCODER,
    FAMILIES,
    FIRST_ATTENTION,
    FIRST_NORM,
    IN_DECODER,
    IN_ENCODER,
    LAST_ATTENTION,
    OPENNMT_ENCODER,
)
from torch import nn

from flaxformer_mt import interop, parity
from flaxformer_mt.parity import references
from flaxformer_mt.parity.diagnosis import first_cause
from flaxformer_mt.parity.diagnosis.causes.registry import (
    CAUSES,
    Candidate,
    SuspectSite,
    candidates,
)
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs
from flaxformer_mt.parity.diagnosis.operations import Given, Softmax
from flaxformer_mt.parity.diagnosis.site_operations import operation
from flaxformer_mt.parity.recipes import recipe
from flaxformer_mt.parity.references import losses
from flaxformer_mt.parity.references.common import not_future


@functools.cache
def example(family: str) -> parity.Tokens:
    variant = FAMILIES[family]
    config, _ = interop.load(
        variant.weight_map, variant.build("float64").state_dict(), **variant.hints
    )
    return parity.example(config, rows=6)


def compared(family: str, change: Change = lambda module: None, **options: Any) -> parity.Report:
    """The report on a changed reference in float64, on a padded batch."""
    variant = FAMILIES[family]
    module = variant.build("float64")
    change(module)
    batch = options.pop("batch", None) or example(family)
    return parity.compare(variant.weight_map, module, batch, **variant.hints, **options)


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


# The last first: the programs of the mutations before are still compiled.
@pytest.mark.slow
@pytest.mark.parametrize("family", list(reversed(FAMILIES)))
def test_an_unchanged_reference_has_no_diagnosis(family):
    report = compared(family)
    assert report.passed, report.first_divergence
    assert report.diagnosis is None


@pytest.mark.slow
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


def with_an_empty_source(tokens: parity.Tokens) -> parity.Tokens:
    """The same batch with a source, the third, of padding alone."""
    empty = np.arange(len(tokens.source))[:, None] == 2
    return tokens._replace(source=np.where(empty, 0, tokens.source))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "says"),
    [
        pytest.param(-1e9, "the mean of all values", marks=pytest.mark.slow),
        (-math.inf, "NaN"),
    ],
)
def test_a_source_of_padding_alone(fill, says):
    """No query of that sentence may attend to any key."""

    def fill_masked(scores, mask):
        return scores.masked_fill(~mask, fill)

    batch = with_an_empty_source(example("annotated"))
    count = int((batch.target_output[2] != 0).sum())
    attentions = [f"decoder.layers.{layer}.src_attn" for layer in range(2)]
    change = all_of(*(with_forward(part, attention(hide=fill_masked)) for part in attentions))
    report = compared("annotated", change, batch=batch)
    site = "decoder/layers/0/cross_attention/weights"
    assert report.first_divergence.site == site
    assert report.diagnosis.cause == "query without any key"
    assert f"of {count} queries" in report.diagnosis.explanation
    assert says in report.diagnosis.explanation
    found = {each.site: each.diagnosis and each.diagnosis.cause for each in report.findings}
    sites = {f"decoder/layers/{layer}/cross_attention/weights" for layer in range(2)}
    assert found == dict.fromkeys(sites, "query without any key")

    report = compared("annotated", change, batch=batch, taps=layer_taps())
    assert report.first_divergence.site == "decoder/layers/0"
    assert report.diagnosis.cause == "query without any key"
    assert says in report.diagnosis.explanation


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_loss_in_bits():
    def in_bits(logits, targets, smoothing, pad_id):
        total, count = losses.jadore801120(logits, targets, smoothing, pad_id)
        return total / math.log(2), count

    theirs = dataclasses.replace(recipe("jadore801120"), loss=in_bits)
    check(compared("jadore801120", recipe=theirs), "loss", "logarithm base", "to the base 2, ours")


@pytest.mark.slow
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
SOLVED = ("dropout", "mask value", "float32 scores", "float32 norm")


INSIDE_A_LAYER = [m for m in ANNOTATED if IN_ENCODER in m.site and m.cause not in SOLVED]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.cause, marks=[pytest.mark.slow] if index % 10 else [])
        for index, mutation in enumerate(INSIDE_A_LAYER)
    ],
)
def test_is_found_inside_a_layer_of_which_only_the_result_is_tapped(mutation):
    report = compared("annotated", mutation.change, taps=layer_taps())
    check(report, IN_ENCODER, mutation.cause, f"at {IN_ENCODER}/")


@pytest.mark.slow
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
        noisy, rounded = ours + rng.normal(size=ours.shape), np.float64(np.float32(ours))
        for theirs in (noisy, rounded, inputs.theirs.get(name, ours)):
            site = SuspectSite(inputs, name, theirs)
            found |= {each.cause for each in candidates(operation(inputs, name), site)}
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_causes_in_the_docs_are_those_that_are_tested(monkeypatch):
    captured = []

    def capture(inputs):
        captured.append(inputs)

    monkeypatch.setattr(first_cause, "diagnose", capture)
    parts = {
        "annotated": "src_embed.0",
        "jadore801120": "encoder.layer_norm",
        "opennmt_rotary": OPENNMT_ENCODER + ".linear_keys",
        "opennmt_alibi": OPENNMT_ENCODER + ".linear_keys",
        "opennmt_t5": OPENNMT_ENCODER + ".linear_keys",
        "opennmt_grouped": OPENNMT_ENCODER + ".linear_keys",
    }
    for family, part in parts.items():
        compared(family, with_output(part, lambda self, y, *_: 2 * y))
    assert len(captured) == len(parts)
    tables = all_of(
        lambda module: module.src_embed[1].pe.copy_(module.src_embed[1].pe.half()),
        lambda module: module.tgt_embed[1].pe.copy_(module.tgt_embed[1].pe.bfloat16()),
    )
    for change in (
        all_of(layers_in_order(0, 0, 1, 2), with_forward("encoder.layers.0", feed_forward_first)),
        all_of(layers_in_order(2, 1, 0), memory_of_layer(None)),
        tables,
    ):
        count = len(captured)
        compared("annotated", change)
        del captured[count + 1 :]
    count = len(captured)
    compared("annotated", batch=with_an_empty_source(example("annotated")))
    del captured[count + 1 :]
    tested = set().union(*map(causes_of, captured))
    text = (DOCS / "parity.md").read_text("utf-8")
    section = text[text.index("## Reading a diagnosis") : text.index("## float32 or float64")]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    documented = set(re.findall(r"`([^`]+)`", "".join(table)))
    assert documented <= tested
    # Some causes are two at once.
    assert [name for name in tested - documented if not {*name.split(" and ")} <= documented] == []


# The order of layers


def layers_in_order(*order: int) -> Change:
    def forward(self, x, mask):
        for index in order:
            x = self.layers[index](x, mask)
        return self.norm(x)

    return with_forward("encoder", forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "site", "cause"),
    [
        pytest.param(
            layers_in_order(0, 1),
            "encoder/layers/2/self_attention_norm",
            "skipped layer",
            marks=pytest.mark.slow,
        ),
        (layers_in_order(0, 2), "encoder/layers/1/self_attention_norm", "skipped layer"),
        pytest.param(
            with_forward("encoder.layers.1", lambda self, x, mask: x),
            "encoder/layers/1/self_attention_norm",
            "skipped layer",
            marks=pytest.mark.slow,
        ),
        (layers_in_order(0, 0, 1, 2), "encoder/layers/1/self_attention_norm", "repeated layer"),
        (layers_in_order(0, 2, 1), "encoder/layers/1/self_attention_norm", "layer order"),
        (layers_in_order(2, 1, 0), "encoder/layers/0/self_attention_norm", "reversed layers"),
        (
            with_forward("encoder.layers.1", feed_forward_first),
            "encoder/layers/1/self_attention_norm",
            "sub-layer order",
        ),
        (memory_of_layer(None), "decoder/layers/0/cross_attention/key", "per-layer memory"),
        (memory_of_layer(1), "decoder/layers/0/cross_attention/key", "memory of another layer"),
    ],
)
def test_the_order_of_layers(change, site, cause):
    report = compared("annotated", change)
    assert report.first_divergence.site == site
    assert report.findings[0].diagnosis.cause == cause
    assert not report.untapped  # What never runs has a tap.
    if "skipped" not in cause:
        assert {each.diagnosis.cause for each in report.findings if each.diagnosis} == {cause}


def detached_statistics(self, x):
    """`annotated`'s LayerNorm, through whose statistics no gradient flows."""
    mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
    return self.a_2 * (x - mean.detach()) / (deviation.detach() + self.eps) + self.b_2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "agrees", "differs"),
    [
        (
            "encoder.layers.1.sublayer.1.norm",
            "encoder/layers/1/feed_forward_norm",
            "encoder/layers/1/self_attention_sum",
        ),
        pytest.param(
            "decoder.norm", "decoder/final_norm", "decoder/layers/1", marks=pytest.mark.slow
        ),
    ],
)
def test_detached_statistics_are_located(part, agrees, differs):
    report = compared("annotated", with_forward(part, detached_statistics))
    assert report.first_divergence.section == "gradients"
    (note,) = report.notes
    assert f"agree down to {agrees}" in note, note
    assert f"differ at {differs}" in note, note
    assert note in " ".join(str(report).split())


def test_a_relu_is_not_dropout():
    change = with_output(f"{ENCODER}.feed_forward", lambda self, y, x: y.relu())
    check(
        compared("annotated", change),
        f"{IN_ENCODER}/feed_forward_sum",
        "activation added",
        "applies relu",
    )


def test_both_faults_are_listed():
    report = compared(
        "annotated",
        all_of(with_values(FIRST_NORM, eps=1e-3), with_values(LAST_ATTENTION, d_k=1)),
    )
    found = [(each.site, each.diagnosis.cause) for each in report.findings]
    assert found == [
        (f"{IN_ENCODER}/self_attention_norm", "norm epsilon"),
        (f"{IN_DECODER}/self_attention/scores", "attention scale"),
    ]
    assert "1 more differ" in str(report)
    assert "attention scale" in str(report)


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
