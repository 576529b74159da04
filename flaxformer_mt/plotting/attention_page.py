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

from flaxformer_mt.plotting import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flaxformer_mt.decoding.attention_weights import (
        AttentionKind,
        AttentionMaps,
        SentenceAttention,
    )

ENDS = {"light": ("#f6f4ef", "#152c78"), "dark": ("#1c2129", "#a8caff")}
"""The colors of the weights 0 and 1 on each background."""
LARGEST_ERROR = 0.004
"""How far a weight may be from the one that its byte stands for."""
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


def palette(background: str) -> np.ndarray:
    """Returns the color scale of weights on a background, "light" or "dark": sRGB, uint8 [256, 3].

    It is a straight line.
    """
    first, last = (list(bytes.fromhex(color[1:])) for color in ENDS[background])
    return np.rint(np.linspace(first, last, 256)).astype(np.uint8)


def quantized(weights: np.ndarray) -> np.ndarray:
    """Returns weights as uint8: 255 times their square roots, rounded.

    Small weights keep more digits than large ones: q stands for (q / 255)^2, which is off by at
    most sqrt(weight) / 255 + 1 / 510^2, less than `LARGEST_ERROR`.
    """
    return np.rint(255 * np.sqrt(np.clip(weights, 0, 1))).astype(np.uint8)


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
        `quantized`, base64), entropies and alignments, in the order of `KINDS`.
        """
        text = json.dumps(_data(self.attention), ensure_ascii=False, separators=(",", ":"))
        surfaces = {f"surface_{name}": ends[0] for name, ends in ENDS.items()}
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

        style: dict[Any, Any] = {**_STYLE, "font.family": _installed_fonts()}
        with rc_context(style), warnings.catch_warnings(record=True) as caught:
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
        "palettes": {name: _base64(palette(name)) for name in ENDS},
        "kinds": [_kind(name, kind, attention) for name, kind in KINDS.items()],
    }


def _kind(name: "AttentionKind", kind: Kind, attention: "SentenceAttention") -> dict[str, Any]:
    described = {"name": name, "label": kind.label, "layers": 0, "heads": 0, "weights": ""}
    described |= {"entropies": [], "alignment": []}
    described |= {side: _side(getattr(kind, side), attention) for side in ("rows", "columns")}
    if name not in attention.maps:
        return described
    maps = attention.maps[name]
    return described | {
        "layers": maps.weights.shape[0],
        "heads": maps.weights.shape[1],
        "weights": _base64(quantized(maps.weights)),
        "entropies": np.round(maps.entropies.astype(float), 3).tolist(),
        "alignment": maps.alignment.tolist(),
    }


def _side(side: Side, attention: "SentenceAttention") -> dict[str, Any]:
    pieces: Sequence[str] = getattr(attention, side.tokens)
    return {
        "name": side.name,
        "role": side.role,
        "tokens": [
            {"text": piece_text(piece), "starts": piece.startswith(_STARTS)} for piece in pieces
        ],
        "rtl": is_right_to_left("".join(pieces)),
    }


def is_right_to_left(text: str) -> bool:
    """Returns whether the first character with a direction is one of Hebrew, Arabic, ..."""
    untagged = re.sub(r"<[^<>]*>|>>[^<>]*<<|__\w+?__", "", text)
    directions = map(unicodedata.bidirectional, untagged)
    return next((each != "L" for each in directions if each in ("L", "R", "AL")), False)


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


_QUIET = "#59616f"
_STYLE = {
    "text.color": "#1c2230", "xtick.labelcolor": _QUIET, "ytick.labelcolor": _QUIET,
    "xtick.major.size": 0, "ytick.major.size": 0, "axes.edgecolor": "#d8d4cc",
    "axes.titlelocation": "left", "axes.titlesize": 10, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "text.parse_math": False,  # Tokens and names of folders may have dollars.
}  # fmt: skip
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
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    matrix, scale = large.subplots(2, 1, height_ratios=(30, 1))
    grids = np.atleast_1d(small.subplots(len(kinds), 1))
    for axes, kind in zip(grids, kinds, strict=True):
        _draw_heads(axes, attention.maps[kind], KINDS[kind].label)
    _draw_sharpest(matrix, attention, kinds[-1])
    scale.imshow(palette("light")[None], aspect="auto", extent=(0, 1, 0, 1))
    weights = (0, 0.05, 0.25, 0.5, 1)
    scale.set_xticks([weight**0.5 for weight in weights], weights)
    scale.set_yticks([])
    note = "weight; below each head is its entropy in bits; dots mark the greatest of a row"
    scale.set_title(note, fontsize=8, color=_QUIET)


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
    axes.set_title(label)
    axes.spines[:].set_visible(False)


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
    axes.tick_params(labelsize=10 if max(weights.shape) <= 30 else 6)
    axes.xaxis.tick_top()
    name = f"{described.label}, layer {layer}, head {head}: {bits[layer, head]:.2f} bits"
    axes.set_title(name, pad=12)


def _label(set_ticks: Any, tokens: Sequence[str], **options: Any) -> None:
    positions = range(0, len(tokens), -(-len(tokens) // _MOST_LABELS))
    set_ticks(positions, [piece_text(tokens[position]) for position in positions], **options)
