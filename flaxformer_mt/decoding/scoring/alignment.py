"""Word alignment from the decoder's cross-attention.

A token does not always attend most to the word that it translates: good layers and heads differ
from model to model, and the second-to-last layer is often better than the last (Garg et al. 2019).
"""

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, words, words_of_tokens
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import is_boundary, is_unsegmented, spaced_words

AlignmentUnit = Literal["words", "pieces"]
"""What an alignment links."""

Links = list[tuple[int, int]]
"""(source, target), both counted from 0, in the order of the target."""


def check_unit(unit: AlignmentUnit | None) -> None:
    """Raises UserError if the unit of an alignment is unknown."""
    if unit is not None and unit not in get_args(AlignmentUnit):
        raise UserError(f"the unit {unit!r} is unknown: align words or pieces")


def without_ends(
    attention: np.ndarray, source: Sequence[int], target: Sequence[int], eos_id: int
) -> np.ndarray:
    """Removes the end tokens' rows and columns from the attention [T, S] of `teacher_force`.

    The source is given without its end token, if it has any; a truncated translation has none.
    """
    ends = len(target) > 0 and target[-1] == eos_id
    return attention[: len(target) - ends, : len(source)]


def align(attention: np.ndarray) -> Links:
    """Links each target token to the source token that it attends to most.

    The attention [T, S] has no rows and columns for end tokens. (Attention to the end token mostly
    means attention to nothing.)
    """
    if not attention.shape[1]:
        return []
    return [(int(source), target) for target, source in enumerate(attention.argmax(axis=1))]


def aligned_words(pieces: Sequence[str]) -> list[int]:
    """Returns the index, from 0, of what an alignment of words calls the word of each piece.

    It is that of `words`, but in text of a script without spaces, where that would be the whole
    sentence, a word also ends before and after each piece of the script.
    """
    groups = words(pieces)
    if not is_unsegmented("".join(pieces).replace(SPACE, " ")):
        return groups
    texts = [piece.removeprefix(SPACE) for piece in pieces]
    added = (
        group == before and bool(start) and is_boundary(start, text)
        for (before, start), (group, text) in itertools.pairwise(zip(groups, texts, strict=True))
    )
    return [
        group + count
        for group, count in zip(groups, itertools.accumulate(added, initial=0), strict=False)
    ]


def text_words(text: str, pieces: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Returns the word that each of the last tokens of a text is of, whose `pieces` are these.

    Words are those of the text as it is given, see `spaced_words`; in a script without spaces,
    those of `aligned_words`.
    """
    (words,) = words_of_tokens([text], tokenizer)
    if words is None or is_unsegmented(text):
        return aligned_words(pieces)
    return words[len(words) - len(pieces) :]


def printed_words(prefixes: Sequence[str], text: str) -> list[int]:
    """Returns the word of a text, see `spaced_words`, that each of its tokens is of, -1 for none.

    `prefixes` are the texts of its first tokens, [N].
    """
    last = len(spaced_words(text)) - 1
    begun = itertools.accumulate((len(spaced_words(prefix)) - 1 for prefix in prefixes), max)
    return [min(max(word, 0), last) for word in begun]


def align_words(attention: np.ndarray, source: Sequence[int], target: Sequence[int]) -> Links:
    """Links each target word to the source word that it attends to most.

    The attention [T, S], without end tokens, from a target word is the mean over its tokens (up to
    a factor, which the argmax ignores); the attention to a source word is the sum over its tokens.
    `source` and `target` are the words of the tokens.
    """
    rows, columns = one_hot(target), one_hot(source)
    has_tokens, is_read = rows.any(axis=0), columns.any(axis=0)
    links = align(np.where(is_read, rows.T @ attention @ columns, -1))
    return [link for link in links if has_tokens[link[1]]]


def one_hot(groups: Sequence[int]) -> np.ndarray:
    """Returns the one-hot encoding [N, G] of group indices 0 to G - 1; zeros for -1."""
    return np.equal.outer(groups, np.arange(max(groups, default=-1) + 1)).astype(np.float32)


def pharaoh(pairs: Links) -> str:
    """Formats links as `0-0 1-2 2-1`, source-target, like Pharaoh, Moses and fast_align."""
    return " ".join(f"{source}-{target}" for source, target in pairs)


def copy_unknown(
    target: Sequence[int],
    attention: np.ndarray,
    source_pieces: Sequence[str],
    tokenizer: Tokenizer,
) -> str:
    """Returns the text of a translation, with unknown tokens replaced by source words.

    Each unknown token becomes the source word that it attends to most; consecutive ones that attend
    to the same word become that word once. A source without words leaves them as they are. The
    tokenizer is that of the target, whose T tokens have no end token; the attention is [T, S].
    """
    if not source_pieces:
        return tokenizer.decode([target])[0]
    groups = aligned_words(source_pieces)
    most = (attention @ one_hot(groups)).argmax(axis=1)
    copied = [
        int(word) if token == tokenizer.unk_id else None
        for token, word in zip(target, most, strict=True)
    ]
    text = ""
    for word, run in itertools.groupby(zip(copied, target, strict=True), key=lambda pair: pair[0]):
        tokens = [token for _, token in run]
        if word is None:
            part = tokenizer.decode([tokens])[0]
            has_space = tokenizer.pieces(tokens[:1])[0].startswith(SPACE)
        else:
            own = [
                piece for piece, group in zip(source_pieces, groups, strict=True) if group == word
            ]
            part = "".join(own).removeprefix(SPACE)
            has_space = not is_boundary(text, part)
        text += " " * (bool(text and part) and has_space) + part
    return text
