"""Output that a program can do without."""

import io
import sys

from flaxformer_mt.standard_output import BestEffortOutput


def test_characters_that_the_output_cannot_encode_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    output = BestEffortOutput("training goes on")
    assert output.write("é ▁der\n") == 7
    output.flush()
    assert written.getvalue() == b"\xe9 \\u2581der\n"
