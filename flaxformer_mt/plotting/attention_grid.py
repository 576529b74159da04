"""The attention of a sentence as an image: a grid of all heads, and one head with its tokens."""

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flaxformer_mt.plotting import drawing
from flaxformer_mt.plotting.attention_kinds import KINDS, Attention, Maps, piece_text
from flaxformer_mt.plotting.palettes import palette, quantized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _QUIET, _LINE = "#1c2230", "#59616f", "#d8d4cc"
_GAP = 0.14
"""Between heads, as a fraction of a head's width."""
_MOST_LABELS = 48
"""Tokens of a side that are all labeled."""
_FONTS = (
    "DejaVu Sans", "Noto Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari", "Hiragino Sans", "PingFang SC", "Yu Gothic",
    "Microsoft YaHei", "Malgun Gothic", "WenQuanYi Zen Hei", "Arial Unicode MS",
)  # fmt: skip
"""Those that are installed draw the characters that the ones before them do not have."""

_log = logging.getLogger(__name__)


def to_image(attention: Attention, title: str, kind: str) -> bytes:
    """Returns an image with a grid of heads per kind, and the head of lowest entropy in large.

    `kind` is one of `drawing.IMAGES`. Characters that no installed font has are boxes, with a
    warning.
    """
    figure = drawing.new_figure(13, 8)
    from matplotlib import rc_context

    fonts: dict[Any, Any] = {"font.family": _installed_fonts()}
    with rc_context(fonts), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _draw(figure, attention, title)
        image = drawing.to_file(figure, kind)
    for warning in caught:
        if "missing from font" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if any("missing from font" in str(warning.message) for warning in caught):
        _log.warning("no installed font has all characters of the tokens: .html shows them")
    return image


def _installed_fonts() -> list[str]:
    from matplotlib import font_manager

    installed = {*font_manager.fontManager.get_font_names()}
    return [name for name in _FONTS if name in installed]


def _draw(figure: "Figure", attention: Attention, title: str) -> None:
    kinds = [kind for kind in KINDS if kind in attention.maps]
    parts: Any = figure.subfigures(1, 2, width_ratios=(7, 5), wspace=0.02)
    large, small = parts
    heading = figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    heading.set_parse_math(False)  # Names of folders may have dollars.
    matrix, scale = large.subplots(2, 1, height_ratios=(30, 1))
    grids = np.atleast_1d(small.subplots(len(kinds), 1))
    for axes, kind in zip(grids, kinds, strict=True):
        _draw_heads(axes, attention.maps[kind], KINDS[kind].label)
    _draw_sharpest(matrix, attention, kinds[-1])
    _draw_scale(scale)


def _colors(weights: np.ndarray) -> np.ndarray:
    return palette("light")[quantized(weights)]


def _draw_heads(axes: Any, maps: Maps, label: str) -> None:
    layers, heads, num_rows, num_columns = maps.weights.shape
    height = min(max(num_rows / num_columns, 0.4), 2.0)
    line = height + _GAP + 0.22  # The last part is for the entropy.
    for layer in range(layers):
        for head in range(heads):
            left, top = head * (1 + _GAP), layer * line
            extent = (left, left + 1, top + height, top)
            axes.imshow(_colors(maps.weights[layer, head]), extent=extent, interpolation="nearest")
            bits = maps.entropies[layer, head].mean()
            below = {"ha": "center", "va": "top", "fontsize": 6, "color": _QUIET}
            axes.text(left + 0.5, top + height + 0.03, f"{bits:.1f}", **below)
    axes.set_xlim(-0.02, heads * (1 + _GAP) - _GAP + 0.02)
    axes.set_ylim(layers * line, -0.02)
    axes.set_xticks([head * (1 + _GAP) + 0.5 for head in range(heads)], range(heads))
    axes.set_yticks([layer * line + height / 2 for layer in range(layers)], range(layers))
    axes.xaxis.tick_top()
    axes.set_title(label, loc="left", fontsize=10, color=_INK)
    _quiet(axes, 7, has_frame=False)


def _draw_sharpest(axes: Any, attention: Attention, kind: str) -> None:
    maps, described = attention.maps[kind], KINDS[kind]
    bits = maps.entropies.mean(axis=-1)
    layer, head = np.unravel_index(bits.argmin(), bits.shape)
    weights = maps.weights[layer, head]
    axes.imshow(_colors(weights), interpolation="nearest")
    rows = np.arange(len(weights))
    columns = maps.alignment[layer, head]
    inks = np.where(weights[rows, columns] > 0.25, "white", "black")
    axes.scatter(columns, rows, s=6, c=inks, linewidths=0)
    _label(axes.set_xticks, getattr(attention, described.columns.tokens), rotation=90)
    _label(axes.set_yticks, getattr(attention, described.rows.tokens))
    axes.xaxis.tick_top()
    name = f"{described.label}, layer {layer}, head {head}: {bits[layer, head]:.2f} bits"
    axes.set_title(name, loc="left", fontsize=10, color=_INK, pad=12)
    _quiet(axes, 10 if max(weights.shape) <= 30 else 6)


def _draw_scale(axes: Any) -> None:
    axes.imshow(palette("light")[None], aspect="auto", extent=(0, 1, 0, 1))
    weights = (0, 0.05, 0.25, 0.5, 1)
    axes.set_xticks([weight**0.5 for weight in weights], weights)
    axes.set_yticks([])
    note = "weight; below each head is its entropy in bits; dots mark the greatest of a row"
    axes.set_title(note, loc="left", fontsize=8, color=_QUIET)
    _quiet(axes, 8)


def _label(set_ticks: Any, tokens: Sequence[str], **options: Any) -> None:
    positions = range(0, len(tokens), -(-len(tokens) // _MOST_LABELS))
    # A dollar sign would begin a formula.
    texts = [piece_text(tokens[position]).replace("$", r"\$") for position in positions]
    set_ticks(positions, texts, **options)


def _quiet(axes: Any, size: float, has_frame: bool = True) -> None:
    axes.tick_params(length=0, labelsize=size, labelcolor=_QUIET)
    axes.spines[:].set_visible(has_frame)
    axes.spines[:].set_color(_LINE)
