"""The page on a port of a public repository is run as it stands."""

import re
from pathlib import Path

import clones

PAGE = Path(__file__).parents[2] / "docs" / "parity-of-a-port.md"


def test_the_page(tmp_path, monkeypatch):
    text = PAGE.read_text("utf-8")
    commit = re.search(r"checkout (\w+)", text)[1]
    url = re.search(r"git clone (\S+)", text)[1]
    port, tests = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "port.py").write_text(port)
    monkeypatch.syspath_prepend(tmp_path)
    with clones.imported(url, commit, "models.model.encoder"):
        found = {}
        exec(compile(tests, str(PAGE), "exec"), found)
        cases = [case for name, case in found.items() if name.startswith("test_")]
        for case in cases:
            case()
        module = found["original"]()
        module.layers[1].norm1.eps = 1e-5
        report = " ".join(str(found["compare"](module)).split())
    assert len(cases) == 2
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.S)
    assert without_numbers(" ".join(shown.split())) in without_numbers(report)


def without_numbers(text):
    """Rounding depends on the processor."""
    return re.sub(r"\d\.\de-1[5-9]", "0", text)
