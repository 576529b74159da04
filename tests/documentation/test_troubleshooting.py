"""The messages that docs/troubleshooting.md quotes are those of the program."""

import ast
import functools
import re

import pytest
from documentation.pages import ROOT, blocks

PAGE = ROOT / "docs/troubleshooting.md"
LEAST = 14
"""Characters of a text in the source that identify a message."""
OF_OTHERS = {"Unrecognized options: --train.batch-size=32"}
"""Messages of tyro."""
MESSAGES = sorted(
    {line for block in blocks(PAGE) if block.language == "text" for line in block.lines} - OF_OTHERS
)


@functools.cache
def texts():
    """Every string of the package."""
    return {
        re.sub(r"\s+", " ", node.value)
        for path in (ROOT / "flaxformer_mt").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("message", [each for each in MESSAGES if not each.startswith("--")])
def test_a_message_is_in_the_program(message):
    body = re.sub(r"^[\w.-]+: (error: )?", "", message)
    parts = {each.strip() for each in texts() if len(each.strip()) >= LEAST and each in message}
    labels = {each for each in texts() if body.startswith(f"{each} ") and len(each) > 4}
    assert parts or labels, message
