"""Reports as text, JSON, HTML and plots."""

import dataclasses
import json
import math
import re
import sys

import numpy as np
import pytest
from html_page import Page

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.program.diagnosis import Diagnosis
from flaxformer_mt.parity.reports.comparison import Finding, Row, Summary
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.trajectories import Curves, Trajectory

AGREEING = (
    Row("source/embedding", (2, 3, 4), 0.0, 0.0, 1e-10),
    Row("encoder/layers/0/self_attention/query", (2, 3, 4), 2e-16, 1e-16, 1e-10),
    Row("encoder/layers/0", (2, 3, 4), 3e-16, 2e-16, 1e-10),
    Row("encoder/layers/1/self_attention/query", (2, 3, 4), 1e-16, 1e-16, 1e-10),
    Row("encoder/layers/1/self_attention/scores", (2, 2, 3, 3), 2e-16, 1e-16, 1e-10),
    Row("encoder/layers/1", (2, 3, 4), 1e-16, 1e-16, 1e-10),
    Row("decoder/layers/0/cross_attention/key", (2, 3, 4), 1e-16, 1e-16, 1e-10),
    Row("decoder/layers/0", (2, 3, 4), 1e-16, 1e-16, 1e-10),
    Row("logits", (2, 3, 5), 4e-16, 1e-16, 1e-10),
    Row("loss", (), 1e-16, 5e-17, 1e-10),
    Row("loss/tunz", (), 3e-16, 3e-17, 1e-10),
    Row("gradient/encoder.layers.0.w.weight", (4, 4), 1e-17, 2e-17, 1e-12),
    Row("gradient/encoder.layers.0.w.bias", (4,), 3e-17, 6e-17, 1e-12),
)
DIVERGING = {
    "encoder/layers/1/self_attention/scores": math.inf,
    "encoder/layers/1": 0.25,
    "decoder/layers/0/cross_attention/key": 0.5,
    "logits": math.nan,
    "loss": 0.1,
    "gradient/encoder.layers.0.w.bias": 1e-3,
}


def test_html_lists_every_finding():
    findings = [
        Finding("encoder/layers/1", 0.25, Diagnosis("norm epsilon", "it is 1 < 2", 1e-16)),
        Finding("logits", 0.5, Diagnosis("logit scale", "it is 4", 1e-16)),
        Finding("output", math.inf, None),
    ]
    text = diverging(findings=tuple(findings), diagnosis=findings[0].diagnosis).to_html()
    shown = text.replace("<wbr>", "")
    assert "Likely cause: norm epsilon; it is 1 &lt; 2." in shown
    assert "2 more differ by themselves" in shown
    assert re.findall(r"<li>(.*?) differs by", shown) == ["logits", "output"]
    assert "no known cause.</li>" in shown


def curves(losses):
    steps = len(losses)
    return Curves(*(np.array(x, np.float64) for x in ([1e-3] * steps, losses, losses, losses)))


def diverging(**fields):
    rows = tuple(
        row._replace(max_abs=DIVERGING[row.site], max_rel=DIVERGING[row.site])
        if row.site in DIVERGING
        else row
        for row in AGREEING
    )
    return Report("annotated", "float64", rows, **fields)


def training(*, differs=True):
    theirs = curves([3.0, 2.0, 1.0])
    ours = curves([3.0, 2.0 + (1e-3 if differs else 0), math.nan if differs else 1.0])
    trajectory = Trajectory(ours, theirs, 1e-8)
    rows = (*AGREEING, Row("steps/rate", (3,), 0.0, 0.0, 1e-11))
    if differs:
        rows += (Row("steps/loss", (3,), math.inf, math.nan, np.float64(2e-8)),)
    return Report("annotated", "float64", rows, trajectory=trajectory)


agreeing = Report("annotated", "float64", AGREEING)
diagnosed = diverging(
    diagnosis=parity.Diagnosis("mask sign", "the reference hides <what> ours shows", 1e-15)
)


def test_summary_and_divergence():
    assert agreeing.passed
    assert agreeing.first_divergence is None
    assert agreeing.summary == Summary(2e-16, 4e-16, 5e-17, 6e-17, None)
    report = diverging()
    assert not report.passed
    assert report.first_divergence.site == "encoder/layers/1/self_attention/scores"
    # NaN is the worst of all.
    assert report.summary == Summary(math.inf, math.inf, 0.1, 1e-3, None)
    assert training().summary.steps == math.inf


def lines_of(report, **options):
    text = report.to_text(**options)
    assert all(len(line) <= options.get("width", 100) for line in text.splitlines())
    return [" ".join(line.split()) for line in text.splitlines()]


def test_text_of_agreement_has_a_line_per_layer():
    lines = lines_of(agreeing)
    assert lines[0] == "annotated in float64: 13 values compared, all agree"
    assert "source/embedding 0 0 1.0e-10 agrees" in lines
    assert "encoder/layers/0 (2), worst encoder/layers/0 3.0e-16 2.0e-16 1.0e-10 agree" in lines
    scores = "encoder/layers/1 (3), worst self_attention/scores"
    assert f"{scores} 2.0e-16 1.0e-16 1.0e-10 agree" in lines
    assert "encoder.layers.0 (2), worst w.bias 3.0e-17 6.0e-17 1.0e-12 agree" in lines
    assert lines[-2].startswith("worst relative differences: values 2.0e-16, losses 5.0e-17,")
    assert lines[-1].endswith("logits: 4.0e-16; float64")
    assert str(agreeing) == agreeing.to_text()


def test_text_of_a_difference_shows_its_surroundings():
    lines = lines_of(diagnosed)
    assert lines[0].startswith("annotated in float64: 13 values compared, 6 differ, the first is")
    # The layer of the first difference is shown in full, the others are not.
    assert "encoder/layers/1/self_attention/query 1.0e-16 1.0e-16 1.0e-10 agrees" in lines
    assert "encoder/layers/1/self_attention/scores inf inf 1.0e-10 DIFFERS FIRST" in lines
    assert "encoder/layers/1 2.5e-01 2.5e-01 1.0e-10 differs" in lines
    worst = "decoder/layers/0 (2), worst cross_attention/key"
    assert f"{worst} 5.0e-01 5.0e-01 1.0e-10 1 differ" in lines
    assert "logits nan nan 1.0e-10 differs" in lines
    explained = "Likely cause: mask sign; the reference hides <what> ours shows."
    assert any(line.startswith(explained) for line in lines)


def test_verbose_text_shows_every_row():
    lines = lines_of(agreeing, verbose=True)
    for row in AGREEING:
        site = row.site.removeprefix("gradient/")
        assert sum(line.startswith(f"{site} ") for line in lines) == 1


def test_text_is_colored_on_demand_and_fits_narrow_terminals():
    assert "\x1b[" not in diverging().to_text()
    assert "\x1b[1;31m" in diverging().to_text(color=True)
    assert "FIRST" in "".join(lines_of(diverging(), width=80))


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (agreeing, ""),
        (diverging(), "No known cause explains it. Every value compared before encoder/layers/1"),
        (training(), "The loss of step 2 differs: "),
        (Report("tunz", "float64", (Row("loss", (), 1.0, 1.0, 0.1),)), "The logits agree"),
        (Report("tunz", "float64", (Row("gradient/w", (), 1.0, 1.0, 0.1),)), "The losses agree"),
    ],
)
def test_a_difference_without_a_known_cause_says_where_to_look(report, words):
    assert report.explanation().startswith(words)
    assert bool(report.explanation()) != report.passed


def test_what_was_not_compared_is_said_in_every_form():
    report = Report("tunz", "float32", AGREEING, untapped=("encoder/<a>", "encoder/b"), kinks=3)
    assert any("ReLU" in remark for remark in report.remarks())
    wide = dataclasses.replace(report, dtype="float64")
    assert not any("ReLU" in remark for remark in wide.remarks())
    unread = "Not compared, because they have no tap: 2 sites, the first is encoder/<a>."
    assert report.remarks()[0] == unread
    assert report.remarks()[1].startswith("Rounding gives 3 hidden units")
    text = " ".join(report.to_text().split())
    assert all(remark in text for remark in report.remarks())
    assert unread in "".join(Page(report.to_html()).data)
    values = json.loads(report.to_json())
    assert (values["untapped"], values["kinks"]) == (["encoder/<a>", "encoder/b"], 3)
    assert agreeing.remarks() == []


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("report", [agreeing, diagnosed, training()])
def test_json_is_strict_and_complete(report):
    values = json.loads(report.to_json(), parse_constant=refuse_constant)
    assert values["passed"] == report.passed
    assert [row["site"] for row in values["rows"]] == [row.site for row in report.rows]
    assert [row["passed"] for row in values["rows"]] == [row.passed for row in report.rows]
    assert [row["section"] for row in values["rows"]] == [row.section for row in report.rows]
    assert values["summary"].keys() == set(Summary._fields)


def test_json_of_what_is_not_finite():
    values = json.loads(diagnosed.to_json())
    sites = {row["site"]: row for row in values["rows"]}
    assert sites["encoder/layers/1/self_attention/scores"]["max_abs"] == "inf"
    assert sites["logits"]["max_rel"] == "nan"
    assert values["first_divergence"] == "encoder/layers/1/self_attention/scores"
    assert values["diagnosis"]["cause"] == "mask sign"
    trajectory = json.loads(training().to_json())["trajectory"]
    assert trajectory["ours"]["loss"] == [3.0, 2.001, "nan"]
    assert trajectory["theirs"]["loss"] == [3.0, 2.0, 1.0]
    assert trajectory["first_divergence"]["step"] == 2


@pytest.mark.slow_except("report0", "report1")
@pytest.mark.parametrize("report", [agreeing, diagnosed, training(), training(differs=False)])
def test_html_is_well_formed_and_needs_nothing_else(report):
    text = report.to_html()
    page = Page(text)
    assert page.tags.count("tr") == len(report.rows) + page.tags.count("thead")
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(
        value.startswith("#")
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href")
    )
    assert not re.search(r"@import|url\((?!#)", text)
    assert ("svg" in page.tags) == (report.trajectory is not None)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert ("first-divergence" in ids) == (not report.passed)
    assert ("#first-divergence" in dict(page.attributes).values()) or report.passed


def test_html_escapes_and_says_pass_and_fail_in_words():
    text = diagnosed.to_html()
    assert "the reference hides &lt;what&gt; ours shows." in text
    assert "<what>" not in text
    page = Page(text)
    assert page.data.count("agrees") == 7
    assert page.data.count("differs") == 5
    assert page.data.count("differs first") == 1
    assert 'style="width: 100%"' in text  # inf
    assert 'style="width: 0%"' in text  # no difference


@pytest.mark.slow
def test_plots_are_written_in_the_format_of_their_name(tmp_path):
    trajectory = training().trajectory
    parity.plot_trajectory(trajectory, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    parity.plot_trajectory(trajectory, tmp_path / "steps.svg")
    assert "<svg" in (tmp_path / "steps.svg").read_text()
    with pytest.raises(
        UserError, match=r"steps\.txt: the name of a plot must end in one of png, svg, pdf"
    ):
        parity.plot_trajectory(trajectory, tmp_path / "steps.txt")
    with pytest.raises(UserError, match=r"steps\.svg is not a folder"):
        parity.plot_trajectory(trajectory, tmp_path / "steps.svg" / "steps.png")
    assert {path.name for path in tmp_path.iterdir()} == {"steps.png", "steps.svg"}


def test_without_matplotlib_plots_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib: pip install 'flaxformer_mt\[plot\]'"):
        training().to_html()
    assert "<table role=" in agreeing.to_html()
