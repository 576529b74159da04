"""What pictures of attention show: its kinds, in words, and the arrays that they are made of."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

_STARTS = "▁", "Ġ"
"""How a piece begins that starts a word: SentencePiece, byte-level BPE."""


class Maps(Protocol):
    """The attention of L layers of H heads, from T tokens (rows) to S tokens (columns)."""

    @property
    def weights(self) -> np.ndarray:
        """float32 [L, H, T, S]."""

    @property
    def entropies(self) -> np.ndarray:
        """In bits, float32 [L, H, T]."""

    @property
    def alignment(self) -> np.ndarray:
        """The column of each row's greatest weight, int [L, H, T]."""


class Attention(Protocol):
    """A sentence, its translation, and the attention of a model that translates it."""

    @property
    def source(self) -> str:
        """The sentence."""

    @property
    def target(self) -> str:
        """Its translation."""

    @property
    def source_tokens(self) -> Sequence[str]:
        """What the encoder reads."""

    @property
    def input_tokens(self) -> Sequence[str]:
        """What the decoder reads."""

    @property
    def target_tokens(self) -> Sequence[str]:
        """What the decoder predicts from each input token and those before it."""

    @property
    def maps(self) -> Mapping[Any, Maps]:
        """By "encoder", "decoder" and "cross"; without those that the model does not have."""


class Side(NamedTuple):
    """What the rows or columns of a kind of attention are."""

    name: str
    tokens: str
    """An attribute of `Attention`."""
    role: str = ""


class Kind(NamedTuple):
    """A kind of attention, in words."""

    label: str
    rows: Side
    columns: Side
    absent: str = ""
    """Why a model may not have it."""


KINDS = {
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
