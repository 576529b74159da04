"""What all pictures share: matplotlib, which is optional, file formats and inline SVG."""

import abc
import functools
import importlib.resources
import io
import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flaxformer_mt import atomic
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


def to_file(figure: "Figure", kind: str) -> bytes:
    """Returns a figure as a file of one of the formats `IMAGES`."""
    output = io.BytesIO()
    figure.savefig(output, format=kind, dpi=DOTS_PER_INCH)
    return output.getvalue()


class Picture(abc.ABC):
    """A web page that can also be written as an image."""

    @abc.abstractmethod
    def to_html(self) -> str:
        """Returns a self-contained web page."""

    @abc.abstractmethod
    def to_image(self, kind: str) -> bytes:
        """Returns an image, in one of the formats `IMAGES`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture: an image (.png, .svg, .pdf), or a self-contained web page (.html).

        Raises:
          UserError: the suffix is another one, the file cannot be written, or matplotlib is needed
            and not installed.
        """
        path = Path(path)
        kind = format_of(path)
        content = self.to_html().encode() if kind == "html" else self.to_image(kind)
        with atomic.new_file(path) as partial:
            partial.write_bytes(content)


@functools.cache
def _template(name: str) -> str:
    folder = importlib.resources.files("flaxformer_mt.plotting")
    return folder.joinpath(name).read_text(encoding="utf-8")


def filled(template: str, **values: str) -> str:
    """Returns a file of this package with its fields, {{name}}, replaced by values."""
    return re.sub(r"\{\{(\w+)\}\}", lambda field: values[field[1]], _template(template))


def page(title: str, style: str, *parts: str) -> str:
    """Returns a self-contained web page."""
    return filled("page.html", title=escape(title), style=style, body="\n".join(parts))


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
