"""Links between the tokens of pairs: from the links of their words, into the rows of batches."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from flaxformer_mt.data.corpora.alignments import AlignedPair
from flaxformer_mt.data.corpora.rows import Dropped
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, words
from flaxformer_mt.errors import UserError

_log = logging.getLogger(__name__)


UNLINKED = "unlinked"
"""The reason of pairs without links: the vocabulary divides their text into other words."""


def encode_links(
    pairs: Sequence[AlignedPair], tokenizers: Tokenizers
) -> tuple[Sentences, list[str]]:
    """Returns the links of each pair: the source and the target token of each, in turn.

    A link of two words becomes one of each of their tokens. A pair has none if the vocabulary
    divides its text into other words than its spaces do; the places of such pairs follow.
    """
    sides = enumerate((tokenizers.source, tokenizers.target))
    split = [tokenizer.split([pair[side] for pair in pairs]) for side, tokenizer in sides]
    links: list[list[int]] = []
    unlinked: list[str] = []
    for pair, *pieces in zip(pairs, *split, strict=True):
        words_of_tokens = [np.array(words(each)) for each in pieces]
        found = [int(side.max(initial=-1)) + 1 for side in words_of_tokens]
        tokens: list[int] = []
        if found == [len(text.split()) for text in pair]:
            for link in pair.links():
                ends = map(np.flatnonzero, map(np.equal, words_of_tokens, link))
                tokens += np.stack(np.meshgrid(*ends), axis=-1).ravel().tolist()
        else:
            unlinked.append(pair.place)
        links.append(tokens)
    return Sentences.from_lists(links), unlinked


def check_links(name: str, pairs: int, notes: Mapping[str, Dropped]) -> None:
    """Reports the pairs of a corpus without links; raises `UserError` if these are all pairs."""
    unlinked = notes.get(UNLINKED)
    if unlinked is None:
        return
    reason = (
        f"{name}: {unlinked.count:,} of {pairs:,} pairs have no links, since the vocabulary "
        f"divides their text into other words than the spaces do; the first is that of "
        f"{unlinked.example}"
    )
    if unlinked.count == pairs:
        raise UserError(reason)
    _log.warning(reason)


def pack_links(
    pairs: TokenPairs, counts: np.ndarray, source_length: int, target_length: int
) -> np.ndarray | None:
    """Returns `Batch.alignment`, float32 [B, T, S], of pairs as in `pack`; None without links.

    Links of truncated tokens are left out.
    """
    sources, targets, links = pairs.sources, pairs.targets, pairs.links
    if sources is None or links is None:
        return None
    dense = np.zeros((len(counts), target_length, source_length), np.float32)
    rows = np.split(np.arange(len(targets)), counts.cumsum())[:-1]
    for row, members in zip(dense, rows, strict=True):
        starts = np.zeros(2, np.int64)
        for pair in members.tolist():
            ends = starts + np.array([len(sources[pair]), len(targets[pair])])
            tokens = starts + links[pair].reshape(-1, 2)
            # Targets end with the end token, also where they were truncated; sources may.
            has_end = sources[pair][-1] == targets[pair][-1]
            source, target = tokens[(tokens < ends - [has_end, 1]).all(axis=1)].T
            row[target, source] = 1
            starts = ends
    return dense / np.maximum(dense.sum(axis=-1, keepdims=True), 1)
