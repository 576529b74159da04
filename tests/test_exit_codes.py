"""One table of exit codes, for all programs and the documentation."""

from pathlib import Path

from flaxformer_mt.exit_codes import ExitCode, table


def test_the_table_fits_80_columns():
    assert max(map(len, table().splitlines())) <= 80


def test_the_documentation_has_the_table():
    text = Path("docs/training.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {int(code)} | {code.meaning} |" in text
