"""The attention of a sentence: as one self-contained HTML page, and as an image.

The image has a grid of all heads, and one head with its tokens. Template, style and script of the
page are the files `attention_page.*` beside this module; it holds all weights in 8 bits, and loads
nothing.
"""

import base64
import dataclasses
import html
import json
import logging
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flaxformer_mt.plotting import drawing, palettes
from flaxformer_mt.plotting.palettes import LARGEST_ERROR, palette, quantized

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flaxformer_mt.decoding.attention_weights import (
        AttentionKind,
        AttentionMaps,
        SentenceAttention,
    )

IFRAME_HEIGHT = 900
"""Pixels of the page in a notebook."""
_STARTS = "▁", "Ġ"
"""How a piece begins that starts a word: SentencePiece, byte-level BPE."""


class Side(NamedTuple):
    """What the rows or columns of a kind of attention are."""

    name: str
    tokens: str
    """An attribute of `SentenceAttention`."""
    role: str = ""


class Kind(NamedTuple):
    """A kind of attention, in words."""

    label: str
    rows: Side
    columns: Side
    absent: str = ""
    """Why a model may not have it."""


KINDS: "Mapping[AttentionKind, Kind]" = {
    "encoder": Kind(
        "Encoder",
        Side("Source", "source_tokens", "each token attends"),
        Side("Source", "source_tokens", "attended to"),
    ),
    "decoder": Kind(
        "Decoder",
        Side("Next token", "target_tokens", "each is predicted from the tokens before it"),
        Side("Translation so far", "input_tokens", "attended to"),
        "The decoder of this model is recurrent: it has no self-attention.",
    ),
    "cross": Kind(
        "Cross-attention",
        Side("Translation", "target_tokens", "each token attends to the source"),
        Side("Source", "source_tokens", "attended to"),
    ),
}
"""In the order of computation; the page opens with the last one."""


def starts_word(piece: str) -> bool:
    """Returns whether a piece of a vocabulary starts a word."""
    return piece.startswith(_STARTS)


def piece_text(piece: str) -> str:
    """Returns a piece without the mark of a word's start; a visible space for the mark alone."""
    return piece.lstrip("".join(_STARTS)) or "␣"


@dataclasses.dataclass(frozen=True)
class AttentionPicture(drawing.Picture):
    """The attention of a sentence; in a notebook it shows as an interactive page.

    picture = run.attention("A dog is running.")
    picture.save("attention.html")
    """

    attention: "SentenceAttention"
    title: str = "Attention"

    def __repr__(self) -> str:
        return f"AttentionPicture({self.attention.source!r} -> {self.attention.target!r})"

    def _repr_html_(self) -> str:
        """Returns the page in a frame of its own, as notebooks show it."""
        page = html.escape(self.to_html())
        return (
            f'<iframe srcdoc="{page}" title="{html.escape(self.title)}" '
            f'style="width: 100%; height: {IFRAME_HEIGHT}px; border: 0"></iframe>'
        )

    def to_html(self) -> str:
        """Returns the page.

        Its data are the JSON value of the element "data": `kinds` with their tokens, weights (see
        `palettes.quantized`, base64), entropies and alignments, in the order of `KINDS`.
        """
        text = json.dumps(_data(self.attention), ensure_ascii=False, separators=(",", ":"))
        surfaces = {f"surface_{name}": ends[0] for name, ends in palettes.ENDS.items()}
        return drawing.filled(
            "attention_page.html",
            title=html.escape(self.title),
            source=html.escape(self.attention.source),
            target=html.escape(self.attention.target),
            loss=str(LARGEST_ERROR),
            style=drawing.filled("attention_page.css", **surfaces),
            script=drawing.filled("attention_page.js"),
            # Nothing in a script element is markup, except for its end and comments.
            data=text.replace("<", "\\u003c"),
        )

    def to_image(self, kind: str) -> bytes:
        """Returns an image with a grid of heads per kind, and the head of lowest entropy in large.

        `kind` is one of `drawing.IMAGES`. Characters that no installed font has are boxes, with a
        warning.
        """
        figure = drawing.new_figure(13, 8)
        from matplotlib import rc_context

        fonts: dict[Any, Any] = {"font.family": _installed_fonts()}
        with rc_context(fonts), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _draw(figure, self.attention, self.title)
            image = drawing.to_file(figure, kind)
        for warning in caught:
            if "missing from font" not in str(warning.message):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        if any("missing from font" in str(warning.message) for warning in caught):
            _log.warning("no installed font has all characters of the tokens: .html shows them")
        return image


def _data(attention: "SentenceAttention") -> dict[str, Any]:
    return {
        "note": " ".join(kind.absent for name, kind in KINDS.items() if name not in attention.maps),
        "palettes": {name: _base64(palettes.palette(name)) for name in palettes.ENDS},
        "kinds": [_kind(name, kind, attention) for name, kind in KINDS.items()],
    }


def _kind(name: "AttentionKind", kind: Kind, attention: "SentenceAttention") -> dict[str, Any]:
    described = {"name": name, "label": kind.label, "layers": 0, "heads": 0, "weights": ""}
    if name not in attention.maps:
        return described | {"entropies": [], "alignment": []} | _sides(kind, attention)
    maps = attention.maps[name]
    layers, heads = maps.weights.shape[:2]
    return described | {
        "layers": layers,
        "heads": heads,
        "weights": _base64(quantized(maps.weights)),
        "entropies": np.round(maps.entropies.astype(float), 3).tolist(),
        "alignment": maps.alignment.tolist(),
        **_sides(kind, attention),
    }


def _sides(kind: Kind, attention: "SentenceAttention") -> dict[str, Any]:
    return {name: _side(getattr(kind, name), attention) for name in ("rows", "columns")}


def _side(side: Side, attention: "SentenceAttention") -> dict[str, Any]:
    pieces: Sequence[str] = getattr(attention, side.tokens)
    return {
        "name": side.name,
        "role": side.role,
        "tokens": [{"text": piece_text(piece), "starts": starts_word(piece)} for piece in pieces],
        "rtl": is_right_to_left("".join(pieces)),
    }


def is_right_to_left(text: str) -> bool:
    """Returns whether the first character with a direction is one of Hebrew, Arabic, ..."""
    directions = (unicodedata.bidirectional(character) for character in _without_tags(text))
    return next((each in ("R", "AL") for each in directions if each in ("L", "R", "AL")), False)


def _without_tags(text: str) -> str:
    return re.sub(r"<[^<>]*>|>>[^<>]*<<|__\w+?__", "", text)


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


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


def _installed_fonts() -> list[str]:
    from matplotlib import font_manager

    installed = {*font_manager.fontManager.get_font_names()}
    return [name for name in _FONTS if name in installed]


def _draw(figure: "Figure", attention: "SentenceAttention", title: str) -> None:
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


def _draw_heads(axes: Any, maps: "AttentionMaps", label: str) -> None:
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


def _draw_sharpest(axes: Any, attention: "SentenceAttention", kind: "AttentionKind") -> None:
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
