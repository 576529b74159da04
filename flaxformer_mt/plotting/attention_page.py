"""The attention of a sentence as one self-contained HTML page.

Template, style and script are the files `attention_page.*` beside this module. The page holds all
weights in 8 bits; it loads nothing.
"""

import base64
import dataclasses
import html
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxformer_mt.plotting import drawing, palettes
from flaxformer_mt.plotting.attention_grid import to_image
from flaxformer_mt.plotting.attention_kinds import (
    KINDS,
    Attention,
    Kind,
    Side,
    piece_text,
    starts_word,
)
from flaxformer_mt.plotting.palettes import LARGEST_ERROR, quantized

IFRAME_HEIGHT = 900
"""Pixels of the page in a notebook."""


@dataclasses.dataclass(frozen=True)
class AttentionPicture(drawing.Picture):
    """The attention of a sentence; in a notebook it shows as an interactive page.

    picture = run.attention("A dog is running.")
    picture.save("attention.html")
    """

    attention: Attention
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
        """Returns the page."""
        return to_html(self.attention, self.title)

    def to_image(self, kind: str) -> bytes:
        """Returns an image of all heads."""
        return to_image(self.attention, self.title, kind)


def to_html(attention: Attention, title: str) -> str:
    """Returns the page of a sentence.

    Its data are the JSON value of the element "data": `kinds` with their tokens, weights (see
    `palettes.quantized`, base64), entropies and alignments, in the order of `KINDS`.
    """
    text = json.dumps(_data(attention), ensure_ascii=False, separators=(",", ":"))
    surfaces = {f"surface_{name}": ends[0] for name, ends in palettes.ENDS.items()}
    return drawing.filled(
        "attention_page.html",
        title=html.escape(title),
        source=html.escape(attention.source),
        target=html.escape(attention.target),
        loss=str(LARGEST_ERROR),
        style=drawing.filled("attention_page.css", **surfaces),
        script=drawing.filled("attention_page.js"),
        # Nothing in a script element is markup, except for its end and comments.
        data=text.replace("<", "\\u003c"),
    )


def _data(attention: Attention) -> dict[str, Any]:
    return {
        "note": " ".join(kind.absent for name, kind in KINDS.items() if name not in attention.maps),
        "palettes": {name: _base64(palettes.palette(name)) for name in palettes.ENDS},
        "kinds": [_kind(name, kind, attention) for name, kind in KINDS.items()],
    }


def _kind(name: str, kind: Kind, attention: Attention) -> dict[str, Any]:
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


def _sides(kind: Kind, attention: Attention) -> dict[str, Any]:
    return {name: _side(getattr(kind, name), attention) for name in ("rows", "columns")}


def _side(side: Side, attention: Attention) -> dict[str, Any]:
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
