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
    dropped,
    positions,
    with_forward,
    with_output,
    with_values,
)
from mutations import (
    ANNOTATED,
    CASES,
    ENCODER,
    EVERY_CASE,
    FAMILIES,
    FIRST_ATTENTION,
    FIRST_NORM,
    IN_DECODER,
    IN_ENCODER,
    LAST_ATTENTION,
)
from test_thirty_faults import FAULTS
from torch import nn

from flaxformer_mt import interop, parity
from flaxformer_mt.parity import references
from flaxformer_mt.parity.causes.losses import another_loss
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.program import differences
from flaxformer_mt.parity.program.diagnosis import most_specific
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


def check(report: parity.Report, site: str, cause: str | None, says: str = "") -> None:
    """The first difference is at the site, and has that name."""
    assert report.first_divergence is not None
    assert report.first_divergence.site == site
    assert not [note for note in report.notes if "not tested" in note]
    if cause is None:
        assert report.diagnosis is None
        return
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


@pytest.mark.slow
def test_dropout_of_attention_weights():
    """With no more keys than features of a head, their context tells the weights."""
    config, _ = interop.load(
        "annotated", FAMILIES["annotated"].build("float64").state_dict(), num_heads=4
    )
    batch = parity.example(config, rows=6, source_length=4)
    change = with_forward(FIRST_ATTENTION, attention(between=lambda w: dropped(nn.Identity(), w)))
    report = compared("annotated", change, batch=batch)
    check(report, f"{IN_ENCODER}/self_attention/context", "dropout", "at a rate of 0.25")


def with_an_empty_source(tokens: parity.Tokens) -> parity.Tokens:
    """The same batch with a source, the third, of padding alone."""
    empty = np.arange(len(tokens.source))[:, None] == 2
    return tokens._replace(source=np.where(empty, 0, tokens.source))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (-1e9, "the mean of all values"),
        pytest.param(
            -math.inf,
            "NaN",
            marks=pytest.mark.xfail(reason="it is taken for an inverted mask", strict=True),
        ),
    ],
)
def test_a_source_of_padding_alone(fill, says):
    """No query of that sentence may attend to any key."""

    def fill_masked(scores, mask):
        return scores.masked_fill(~mask, fill)

    batch = with_an_empty_source(example("annotated"))
    count = batch.target_output.shape[1]
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


# Losses


@pytest.mark.slow
def test_a_loss_in_bits():
    def in_bits(logits, targets, smoothing, pad_id):
        total, count = losses.jadore801120(logits, targets, smoothing, pad_id)
        return total / math.log(2), count

    theirs = dataclasses.replace(recipe("jadore801120"), loss=in_bits)
    check(compared("jadore801120", recipe=theirs), "loss", "logarithm base", "to the base 2, ours")


LOGITS = np.random.default_rng(0).normal(size=(3, 4, 11))
TARGET_INPUT = np.array([[1, 4, 9, 3], [1, 6, 0, 0], [1, 3, 7, 0]])
TARGETS = np.array([[4, 9, 3, 2], [6, 2, 0, 0], [3, 7, 2, 0]])


def sums_of(family: str, smoothing: float = 0.1, pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The published loss of each sentence, and its number of tokens."""
    pairs = [
        losses.LOSSES[family](torch.tensor(z), torch.tensor(y), smoothing, pad_id)
        for z, y in zip(LOGITS, TARGETS, strict=True)
    ]
    sums, counts = np.array([[float(loss), float(count)] for loss, count in pairs]).T
    return sums, counts


def mean(sums: np.ndarray, counts: np.ndarray) -> float:
    return sums.sum() / counts.sum()


SUMS, COUNTS = sums_of("jadore801120")
LOG_P = torch.tensor(LOGITS).log_softmax(-1).numpy()
ONE_HOT = np.eye(11)[TARGET_INPUT]
SHIFTED = -((0.9 * ONE_HOT + 0.01 * (1 - ONE_HOT)) * LOG_P).sum(-1)[TARGET_INPUT != 0].mean()


LOSSES = [
    (mean(*sums_of("torch")), "label-smoothing convention", "uniform in place of others"),
    (mean(*sums_of("tunz")), "label-smoothing convention", "others_kl"),
    (mean(*sums_of("annotated")), "label-smoothing convention", "non_pad_kl"),
    (mean(*sums_of("annotated_wide_heads")), "label-smoothing convention", "annotated_wide"),
    (mean(*sums_of("fairseq", 0.0)), "smoothing amount", "0.0 in place of 0.1"),
    (mean(*sums_of("jadore801120", pad_id=-100)), "padding in the loss", "padding counted"),
    (SUMS.sum(), "loss reduction", "sum over tokens in"),
    (SUMS.mean(), "loss reduction", "divided by sentences"),
    ((SUMS / COUNTS).mean(), "loss reduction", "mean over sentences of their means"),
    (SUMS.sum() / 12, "loss reduction", "divided by tokens and padding"),
    (mean(SUMS, COUNTS) / math.log(10), "logarithm base", "to the base 10"),
    (SHIFTED, "shifted targets", "instead of its targets"),
    (3.14159265, None, ""),
]


@pytest.mark.parametrize(("loss", "cause", "says"), LOSSES)
def test_another_loss(loss, cause, says):
    settings = {"convention": "others", "smoothing": 0.1, "pad_id": 0}
    found = most_specific(another_loss(LOGITS, TARGETS, TARGET_INPUT, loss, **settings), 1e-10)
    assert (found and found.cause) == cause
    assert says in (found.explanation if found else "")


def test_fairseq_smooths_as_jadore801120():
    np.testing.assert_allclose(sums_of("fairseq")[0], SUMS, rtol=1e-12)


def test_positions_that_are_counted_over_real_tokens():
    tokens = example("annotated")
    moved = np.stack(
        [
            np.roll(row, len(row) - n)
            for row, n in zip(tokens.source, (tokens.source != 0).sum(1), strict=True)
        ]
    )
    counted = np.maximum((moved != 0).cumsum(axis=1) - 1, 0)
    change = with_forward("src_embed.1", lambda self, x: x + self.pe[0, counted])
    report = compared("annotated", change, batch=tokens._replace(source=moved))
    check(report, "source/embedded", "position counting", "count real tokens only")


# References with few taps


def annotated_taps() -> dict[str, parity.Tap]:
    variant = FAMILIES["annotated"]
    module = variant.build("float64")
    config, _ = interop.load("annotated", module.state_dict(), **variant.hints)
    return references.taps("annotated", config, module)


def layer_taps() -> dict[str, parity.Tap]:
    """Only the taps of the layers' outputs."""
    return {site: tap for site, tap in annotated_taps().items() if re.search(r"/\d$", site)}


INSIDE_A_LAYER = [mutation for mutation in ANNOTATED if IN_ENCODER in mutation.site]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [pytest.param(mutation, id=mutation.cause) for mutation in INSIDE_A_LAYER],
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


DOCS = (Path(__file__).parents[2] / "docs/parity.md").read_text("utf-8")


def test_the_causes_of_mutations_are_documented():
    section = DOCS[DOCS.index("## Reading a diagnosis") : DOCS.index("## float32 or float64")]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    documented = set(re.findall(r"`([^`]+)`", "".join(table)))
    found = {mutation.cause for _, mutation in EVERY_CASE}
    found |= {cause for causes in FAULTS.values() for cause in causes.values()}
    found |= {"feed-forward replaced", "query without any key"}
    found |= {cause for _, cause, _ in LOSSES}
    tested = {name for cause in found if cause for name in cause.split(" and ")}
    assert tested <= documented
    assert documented - tested == {
        *("constant", "different positions", "extra causal mask", "extra padding mask"),
        *("embedding missing", "embedding added twice", "positions added twice"),
        *("missing mask", "operand missing", "position bias scale", "residual added twice"),
        *("slope sign", "sub-layer added twice"),
    }


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
        ("decoder.norm", "decoder/final_norm", "decoder/layers/1"),
    ],
)
def test_detached_statistics_are_located(part, agrees, differs):
    report = compared("annotated", with_forward(part, detached_statistics))
    assert report.first_divergence.section == "gradients"
    (note,) = report.notes
    assert f"agree down to {agrees}" in note, note
    assert f"differ at {differs}" in note, note
    assert note in " ".join(str(report).split())


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


def test_a_cause_of_ones_own(monkeypatch):
    def roots_of_weights(segment):
        words = "the reference takes the roots of weights"
        yield segment.diagnosis("roots", words, segment.value**0.3)

    change = with_forward(FIRST_ATTENTION, attention(between=lambda weights: weights**0.3))
    site = f"{IN_ENCODER}/self_attention/weights"
    taps = annotated_taps() | {site: parity.Tap(FIRST_ATTENTION, op="bmm", call=1, side="input")}
    assert compared("annotated", change, taps=taps).diagnosis is None
    monkeypatch.setattr(differences, "CAUSES", [*differences.CAUSES, roots_of_weights])
    check(compared("annotated", change, taps=taps), site, "roots")
