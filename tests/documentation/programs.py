"""Runs the Python of the documentation, in one namespace per page."""

import contextlib
import doctest
import io
from typing import Any

import jax
from documentation import outputs
from documentation.pages import Block


def run(block: Block, names: dict[str, Any]) -> tuple[str, str]:
    """Runs a block, which may change `names`.

    Returns:
      How its results differ from those of a session, or "", and what it prints.
    """
    text = "\n".join(block.lines)
    printed = io.StringIO()
    if not text.startswith(">>> "):
        # As readers run it: the tests forbid what optax's Adam does.
        with contextlib.redirect_stdout(printed), jax.numpy_dtype_promotion("standard"):
            exec(compile(text, str(block), "exec"), names)
        return "", printed.getvalue()
    differences = []
    for example in doctest.DocTestParser().get_examples(text):
        start = printed.tell()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.source, str(block), "single"), names)
        shown = [outputs.without_texts(line) for line in example.want.splitlines()]
        result = printed.getvalue()[start:]
        lines = [outputs.without_texts(line) for line in result.splitlines()]
        if shown != lines:
            differences.append(f"{block}: {example.source}shows {shown} but prints {lines}")
    return "\n".join(differences), printed.getvalue()
