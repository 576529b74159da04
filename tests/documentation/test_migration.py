"""The tables of docs/migration.md name options that exist, with values that they take."""

import dataclasses
import re

import pytest
from documentation.pages import MIGRATION, prose

from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import bounds_of, check_value, choices_of, type_hints

TEXT = MIGRATION.read_text(encoding="utf-8")
FIELD = re.compile(rf"`((?:{'|'.join(groups())})\.\w+)(?:=([^`]+))?`")
TOOLKITS = ("fairseq", "OpenNMT-py and eole", "JoeyNMT", "Marian", "Hugging Face Trainer", "T5X")


def tables(section):
    """Yields the rows of each table of a section, without its heading."""
    for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
        yield [line.strip("|\n ").split(" | ") for line in table.splitlines()[2:]]


def section(toolkit):
    return TEXT.split(f"\n## {toolkit}\n")[1].split("\n## ")[0]


OURS_BY_ROW = [row[1] for name in TOOLKITS for rows in tables(section(name)) for row in rows]


@pytest.mark.parametrize(("name", "value"), sorted({*FIELD.findall(prose(MIGRATION))}))
def test_an_option_of_a_table_exists_and_takes_its_value(name, value):
    group, _, field_name = name.partition(".")
    kind = groups()[group]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    assert field_name in fields, name
    if value and value != "N":
        hint = type_hints(kind)[field_name]
        is_text = hint is str or isinstance((choices_of(hint) or [None])[0], str)
        literal = value if is_text else {"True": True, "False": False}[value]
        check_value(literal, hint, bounds_of(fields[field_name]), name)


def test_names_like_fields_are_fields():
    """A group that is misspelled, such as `optim.learning_rate`, would not be checked."""
    names = re.findall(r"`([a-zA-Z]+)\.[a-z_]+(?:=[^`]*)?`", "\n".join(OURS_BY_ROW))
    assert {*names} <= {*groups(), "CorpusConfig"}
