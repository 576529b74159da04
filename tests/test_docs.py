"""The tests, variants and families that docs/quirks.md and docs/reliability.md cite exist."""

import ast
import fnmatch
import functools
import importlib
import re
from pathlib import Path

import pytest
from toy_references import VARIANTS

from flaxformer_mt.presets import FAMILIES

ROOT = Path(__file__).parent.parent
QUIRKS = (ROOT / "docs/quirks.md").read_text(encoding="utf-8")


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[^`]+::\w+)`", QUIRKS))))
def test_every_test_that_pins_a_quirk_exists(test):
    path, name = test.split("::")
    assert name in functions_of(path)


@pytest.mark.parametrize("pattern", sorted(set(re.findall(r"`equal\[([\w*]+)\]`", QUIRKS))))
def test_every_variant_that_pins_a_quirk_exists(pattern):
    assert fnmatch.filter([*VARIANTS, "double_projection"], pattern)


@pytest.mark.parametrize("mutation", sorted(set(re.findall(r"`found\[(\w[^`]+)\]`", QUIRKS))))
def test_every_mutation_that_pins_a_quirk_exists(mutation, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/parity")
    cases = importlib.import_module("mutations").CASES
    assert fnmatch.filter([case.id for case in cases], mutation)


def test_every_quirk_is_pinned():
    rows = [line for line in QUIRKS.splitlines() if line.startswith("| ")]
    assert len(rows) > 60
    for row in rows:
        cells = row.strip("| ").split(" | ")
        assert cells[0] == "family" or "`" in cells[-1], row


def test_every_family_has_its_quirks():
    for family in FAMILIES:
        assert re.search(rf"^\| [\w, ()]*\b{family}\b", QUIRKS, re.MULTILINE), family


def guarantees():
    text = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = text.partition("| what happens |")[2].partition("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").replace(r"\|", "").split(" | ") for row in rows]


@pytest.mark.parametrize("row", guarantees(), ids=lambda row: row[0][:40])
def test_every_promise_of_reliability_names_its_tests(row):
    _, _, tests = row
    paths = re.findall("`([^`]+)`", tests)
    assert paths
    assert all((ROOT / "tests" / path).is_file() for path in paths), paths
