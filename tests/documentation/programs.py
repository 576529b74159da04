"""Runs the Python of the documentation, in one namespace per page."""

import contextlib
import doctest
import io
from typing import Any

from documentation import outputs
from documentation.pages import Block


def run(block: Block, names: dict[str, Any]) -> str:
    """Runs a block, which may change `names`; returns what is wrong with it, or ""."""
    text = "\n".join(block.lines)
    if not text.startswith(">>> "):
        exec(compile(text, str(block), "exec"), names)
        return ""
    differences = []
    for example in doctest.DocTestParser().get_examples(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.source, str(block), "single"), names)
        shown = [outputs.without_texts(line) for line in example.want.splitlines()]
        lines = [outputs.without_texts(line) for line in printed.getvalue().splitlines()]
        if shown != lines:
            differences.append(f"{example.source}shows {shown} but prints {lines}")
    return "\n".join(differences)
