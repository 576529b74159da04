"""The reference has every public name, with an example, and every field of the configuration."""

import importlib
import re

import pytest
from documentation.pages import ROOT

import flaxformer_mt as fmt

REFERENCES = sorted((ROOT / "docs").glob("reference-*.md"))
ENTRY = re.compile(r"^::: (flaxformer_mt\.\S+)$", re.M)
ENTRIES = {
    name: page for page in REFERENCES for name in ENTRY.findall(page.read_text(encoding="utf-8"))
}


def section(name):
    """The text from the entry of a name to the next heading."""
    text = ENTRIES[name].read_text(encoding="utf-8")
    return text.partition(f"\n::: {name}\n")[2].split("\n##")[0]


@pytest.mark.parametrize("name", sorted({*fmt.__all__} - {"__version__"}))
def test_every_public_name_has_an_entry_with_an_example(name):
    assert "\n```python\n" in section(f"flaxformer_mt.{name}")


def test_the_page_of_scripts_is_short_and_lists_all_names():
    text = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| [") and "reference-" in row]
    assert {*re.findall(r"`(\w+)`", "".join(rows))} == {*fmt.__all__} - {"__version__"}
    assert len(text.split()) <= 1200


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_a_documented_object_under_its_heading(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert found.__doc__
    text = ENTRIES[name].read_text(encoding="utf-8")
    heading = name.removeprefix("flaxformer_mt.").removeprefix("presets.")
    assert f"\n### {heading}\n\n::: {name}\n" in text


def test_the_page_of_fields_is_what_its_program_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    program = importlib.import_module("configuration_fields")
    written = program.PAGE.read_text(encoding="utf-8")
    assert written == program.page(), "run: python docs/configuration_fields.py"
