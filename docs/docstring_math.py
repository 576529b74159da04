r"""Equations of docstrings in the site: `.. math:: \frac{1}{2}` and :math:`\tau` become MathML.

An extension of griffe, which reads the docstrings for mkdocstrings (mkdocs.yml). Browsers show
MathML without a program of another server.
"""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_BLOCK = re.compile(r"^\.\. math:: *(.+(?:\n[ \t]+\S.*)*)", re.M)
_INLINE = re.compile(r":math:`([^`]+)`")


class DocstringMath(griffe.Extension):
    """Replaces the equations of every docstring when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_mathml(obj.docstring.value)


def with_mathml(text: str) -> str:
    """Returns a docstring whose equations are MathML."""
    text = _BLOCK.sub(lambda match: f"<div>{_converted(match[1], 'block')}</div>\n", text)
    return _INLINE.sub(lambda match: _converted(match[1], "inline"), text)


def _converted(latex: str, display: str) -> str:
    return convert(" ".join(latex.split()), display=display)
