"""Output that a program can do without."""

import errno
import io
import sys

from rich.console import Console
from rich.live import Live

from flaxformer_mt.standard_output import BestEffortOutput


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    output = BestEffortOutput("training goes on")
    assert output.write("é ▁der\n") == 7
    output.flush()
    assert written.getvalue() == b"\xe9 \\u2581der\n"


def test_a_closed_terminal_below_a_status_line_is_reported_once(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console(file=BestEffortOutput("training goes on"), force_terminal=True)
    with Live("status", console=console, auto_refresh=False) as live:
        console.print("a line")
        live.refresh()
        print("another")
    assert capsys.readouterr().err.count("Input/output error): training goes on") == 1
