"""The first and the last token of sentences, such as that of their language."""

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


def until_end(tokens: Sequence[int], end_id: int) -> list[int]:
    """Returns the tokens before the first end token, if there is one."""
    tokens = [int(token) for token in tokens]
    return tokens[: tokens.index(end_id)] if end_id in tokens else tokens
