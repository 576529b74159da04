"""What all pictures share: matplotlib, which is optional, file formats and inline SVG."""

import io
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxformer_mt.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = ("png", "svg", "pdf")
"""Formats that matplotlib writes."""
DOTS_PER_INCH = 150
"""Of a PNG file."""
FORMATS = (*IMAGES, "html")
"""Formats of a picture, which are the suffixes of its file."""


def format_of(path: Path) -> str:
    """Returns the format that the name of an output file asks for, or raises UserError."""
    name = path.suffix.removeprefix(".").lower()
    if name not in FORMATS:
        endings = ", ".join(f".{each}" for each in FORMATS)
        raise UserError(f"{path}: the name of a picture must end in one of {endings}")
    return name


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of matplotlib, sizes in inches; UserError if it is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'flaxformer_mt[plot]'") from error
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)  # In inches.
    return Figure(figsize=(width, height), layout=layout)


def to_png(figure: "Figure") -> bytes:
    """Returns a figure as a PNG file."""
    output = io.BytesIO()
    figure.savefig(output, format="png", dpi=DOTS_PER_INCH)
    return output.getvalue()


def page(title: str, style: str, *parts: str) -> str:
    """Returns a self-contained web page."""
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    start = f"<style>{style}</style></head>\n<body><h1>{escape(title)}</h1>"
    return "\n".join(
        ['<!DOCTYPE html>\n<html lang="en">', head, view, start, *parts, "</body></html>\n"]
    )


def to_inline_svg(figure: "Figure", name: str, colors: Mapping[str, str] = {}) -> str:
    """Returns a figure as a transparent `<svg>` element with selectable text.

    `name` makes its ids unique in a page; `colors` replaces colours (#rrggbb), as by
    `currentColor`.
    """
    from matplotlib import rc_context

    output = io.StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with rc_context(settings):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(output, format="svg", transparent=True, metadata=nothing)
    text = output.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    referenced = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] * (found[1] in referenced), text)
    for color, replacement in colors.items():
        text = text.replace(color.lower(), replacement)
    return text.strip()
