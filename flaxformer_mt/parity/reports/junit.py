"""Renders a comparison as JUnit XML, which continuous integration services display."""

import collections
import itertools
from xml.etree import ElementTree

from flaxformer_mt.parity.reports.comparison import Comparison, format_difference


def to_junit(comparison: Comparison) -> str:
    """Returns a test suite per section, with a test case per value; accepted ones are skipped."""
    name = f"parity of {comparison.family} in {comparison.dtype}"
    root = ElementTree.Element("testsuites", name=name)
    settings = comparison.settings
    if settings:
        suite = _suite(root, "settings", {"tests": len(settings), "failures": len(settings)})
        for each in settings:
            case = _case(suite, "settings", each.name)
            ElementTree.SubElement(case, "failure", message=str(each))
    for section, members in itertools.groupby(comparison.rows, key=lambda row: row.section):
        rows = list(members)
        verdicts = collections.Counter(row.verdict for row in rows)
        failures, skipped = verdicts["differs"], verdicts["accepted"]
        counts = {"tests": len(rows), "failures": failures, "skipped": skipped}
        suite = _suite(root, section, counts)
        for row in rows:
            case = _case(suite, section, row.site)
            if row.verdict == "accepted":
                ElementTree.SubElement(case, "skipped", message=f"accepted: {row.accepted}")
            elif row.verdict == "differs":
                numbers = map(format_difference, (row.max_abs, row.max_rel, row.tolerance))
                message = "difference {}, relative {}, tolerance {}".format(*numbers)
                failure = ElementTree.SubElement(case, "failure", message=message)
                if row is comparison.first_divergence:
                    failure.text = comparison.explanation()
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, name: str, counts: dict[str, int]) -> ElementTree.Element:
    attributes = {"failures": 0, "errors": 0, "skipped": 0} | counts
    numbers = {key: str(count) for key, count in attributes.items()}
    return ElementTree.SubElement(root, "testsuite", {"name": name} | numbers)


def _case(suite: ElementTree.Element, section: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"parity.{section}", name=name)
