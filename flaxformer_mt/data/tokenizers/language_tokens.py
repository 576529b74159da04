"""The token that a sentence begins with, such as that of its language."""

from collections.abc import Sequence
from typing import Protocol


class HasFirstToken(Protocol):
    """A vocabulary whose sentences may begin with a token of their own."""

    @property
    def first_id(self) -> int | None:
        """Id of the token that sentences begin with; None = none."""

    @property
    def language_ids(self) -> frozenset[int]:
        """Ids of the tokens that name languages; empty unless the vocabulary is multilingual."""


def with_first(tokens: Sequence[int], vocabulary: HasFirstToken) -> list[int]:
    """Returns a sentence with its first token, unless it names its language itself."""
    first = vocabulary.first_id
    names_language = bool(tokens) and tokens[0] in vocabulary.language_ids
    return list(tokens) if first is None or names_language else [first, *tokens]
