"""Verdicts for continuous integration: tolerances by site, accepted differences, JUnit."""

import dataclasses
import functools
from xml.etree import ElementTree

import msgspec
import pytest
from test_report import agreeing, diagnosed

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.program.diagnosis import Diagnosis
from flaxformer_mt.parity.reports.baseline import AcceptedDifference, judged, read_baseline
from flaxformer_mt.parity.reports.comparison import Finding, Row, SettingDifference
from flaxformer_mt.parity.reports.report import Report

REPORT = Report(
    "annotated",
    "float64",
    (
        Row("source/embedded", (2, 3, 4), 2e-8, 1e-8, 2e-10),
        Row("encoder/layers/0", (2, 3, 4), 4e-8, 2e-8, 2e-10),
        Row("logits", (2, 3, 5), 1e-12, 1e-12, 1e-10),
    ),
)
TABLES = AcceptedDifference("*", 1e-7, "published tables are float32")
replaced = functools.partial(msgspec.structs.replace, TABLES)


def written(path, **changes):
    values = {"site": '"*"', "largest": "1e-7", "reason": '"published tables are float32"'}
    lines = [f"{name} = {value}" for name, value in (values | changes).items() if value]
    path.write_text("\n".join(["[[accepted]]", *lines]) + "\n")
    return path


def test_tolerances_by_site_are_relative():
    assert not REPORT.passed
    assert judged(REPORT, {"*": 1e-7}).passed
    found = judged(REPORT, {"*": 1e-7, "encoder/*": 1e-8})
    assert found.first_divergence is not None
    assert found.first_divergence.site == "encoder/layers/0"
    assert judged(REPORT, {"enc": 1}).notes == ("--tolerance enc: no compared site has this name.",)


def test_accepted_differences_pass_and_are_listed(tmp_path):
    found = judged(REPORT, accepted=read_baseline(written(tmp_path / "baseline.toml")))
    assert found.passed
    assert found.headline().endswith("3 values compared, 2 accepted differences, all others agree")
    assert "accepted" in found.to_text()
    assert "accepted" in found.to_html()
    assert '"accepted": "published tables are float32"' in found.to_json()


def test_a_difference_that_grows_or_disappears_is_said():
    smaller = replaced(largest=1.5e-8)
    found = judged(REPORT, accepted=[smaller])
    assert found.first_divergence is not None
    assert found.first_divergence.site == "encoder/layers/0"
    gone = judged(agreeing, accepted=[TABLES])
    assert gone.notes == (
        "The accepted difference at * does not occur: remove it from the baseline.",
    )
    # Of two with the same reason, one may have disappeared.
    one, other = replaced(site="source/embedded"), replaced(site="logits")
    (note,) = judged(REPORT, {"logits": 1}, accepted=[one, other]).notes
    assert note.startswith("The accepted difference at logits does not occur")


def test_the_cause_of_an_accepted_difference_is_not_that_of_the_next():
    first = diagnosed.first_divergence
    assert first is not None
    accepted = AcceptedDifference(first.site, float("inf"), "known")
    found = judged(diagnosed, accepted=[accepted])
    assert diagnosed.diagnosis is not None
    assert found.diagnosis is None
    assert found.first_divergence != first


def test_findings_of_accepted_differences_are_left_out():
    cause = Diagnosis("norm epsilon", "1e-5 instead of 1e-6", 0.0)
    findings = (
        Finding("source/embedded", 1e-8, None),
        Finding("encoder/layers/0", 2e-8, cause),
    )
    report = dataclasses.replace(REPORT, findings=findings)
    found = judged(report, accepted=[replaced(site="source/embedded")])
    assert (found.diagnosis, found.findings) == (cause, findings[1:])
    assert judged(report, accepted=[TABLES]).further() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reason": ""}, r"accepted\[0\]: there is no field reason"),
        ({"reason": '""'}, r"accepted\[0\].reason: expected a string of length >= 1"),
        ({"largest": '"small"'}, r"accepted\[0\].largest: expected a number"),
        ({"why": "1"}, r"accepted\[0\]: unknown field why"),
        ({"site": "["}, "is not TOML"),
    ],
)
def test_a_damaged_baseline_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_baseline(written(tmp_path / "baseline.toml", **changes))


def test_a_baseline_without_entries_is_refused(tmp_path):
    path = tmp_path / "baseline.toml"
    path.write_text("[accept]\n")
    with pytest.raises(UserError, match="unknown field accept"):
        read_baseline(path)


def test_junit_has_a_test_case_per_value():
    root = ElementTree.fromstring(judged(diagnosed, accepted=[TABLES]).to_junit())
    assert sum(int(suite.attrib["tests"]) for suite in root) == len(diagnosed.rows)
    failures = root.findall(".//failure")
    assert len(failures) == sum(not row.passed for row in diagnosed.rows)
    assert sum(int(suite.attrib["failures"]) for suite in root) == len(failures)
    (explained,) = [failure for failure in failures if failure.text]
    assert "Likely cause" in explained.text
    accepted = ElementTree.fromstring(judged(REPORT, accepted=[TABLES]).to_junit())
    messages = [skipped.attrib["message"] for skipped in accepted.findall(".//skipped")]
    assert messages == ["accepted: published tables are float32"] * 2
    named = Report("tunz", "float64", (), settings=(SettingDifference("pad_id", 1, 0, "x.pad"),))
    (failure,) = ElementTree.fromstring(named.to_junit()).findall(".//failure")
    assert failure.attrib["message"] == "pad_id is 1 here, but 0 in x.pad"


def test_assert_parity_fails_with_the_report(tmp_path):
    parity.assert_parity(agreeing)
    with pytest.raises(AssertionError, match="2 differ, the first is source/embedded"):
        parity.assert_parity(REPORT)
    parity.assert_parity(REPORT, tolerances={"*": 1e-7})
    parity.assert_parity(REPORT, baseline=written(tmp_path / "baseline.toml"))
