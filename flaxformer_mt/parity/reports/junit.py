"""Renders a comparison as JUnit XML, which continuous integration services display."""

import collections
import itertools
from xml.etree import ElementTree

from flaxformer_mt.parity.reports.comparison import Comparison, Row, format_difference


def to_junit(comparison: Comparison) -> str:
    """Returns one test suite per section of the report, and one test case per value.

    A difference is a failure, an accepted one a skipped test; so are settings that differ.
    """
    name = f"parity of {comparison.family} in {comparison.dtype}"
    root = ElementTree.Element("testsuites", name=name)
    if comparison.settings:
        suite = _suite(root, "settings", len(comparison.settings), len(comparison.settings), 0)
        for each in comparison.settings:
            case = _case(suite, "settings", each.name)
            ElementTree.SubElement(case, "failure", message=str(each))
    for section, members in itertools.groupby(comparison.rows, key=lambda row: row.section):
        rows = list(members)
        counts = collections.Counter(row.verdict for row in rows)
        suite = _suite(root, section, len(rows), counts["differs"], counts["accepted"])
        for row in rows:
            case = _case(suite, section, row.site)
            if row.verdict == "accepted":
                ElementTree.SubElement(case, "skipped", message=f"accepted: {row.accepted}")
            elif row.verdict == "differs":
                failure = ElementTree.SubElement(case, "failure", message=_message(row))
                if row is comparison.first_divergence:
                    failure.text = comparison.explanation()
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(
    root: ElementTree.Element, name: str, tests: int, failures: int, skipped: int
) -> ElementTree.Element:
    counts = {"tests": tests, "failures": failures, "errors": 0, "skipped": skipped}
    return ElementTree.SubElement(
        root, "testsuite", {"name": name} | {key: str(count) for key, count in counts.items()}
    )


def _case(suite: ElementTree.Element, section: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"parity.{section}", name=name)


def _message(row: Row) -> str:
    return (
        f"difference {format_difference(row.max_abs)}, relative "
        f"{format_difference(row.max_rel)}, tolerance {format_difference(row.tolerance)}"
    )
