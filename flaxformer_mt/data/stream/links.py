"""Links between the tokens of pairs: from the links of their words, into the rows of batches."""

import logging
from collections.abc import Sequence

import numpy as np

from flaxformer_mt.data.corpora.alignments import AlignedPair
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, words
from flaxformer_mt.errors import UserError

_log = logging.getLogger(__name__)


class LinkEncoder:
    """Encodes the word links of a corpus in chunks as links of all tokens of the words."""

    def __init__(self, tokenizers: Tokenizers, name: str):
        self._tokenizers = tokenizers
        self._name = name
        self._pairs = 0
        self._unlinked: list[str] = []

    def encode(self, pairs: Sequence[AlignedPair]) -> Sentences:
        """Returns the links of each pair: the source and the target token of each, in turn.

        A pair has none if the vocabulary divides its text into other words than its spaces do.
        """
        split = [
            tokenizer.split([pair[side] for pair in pairs])
            for side, tokenizer in enumerate((self._tokenizers.source, self._tokenizers.target))
        ]
        self._pairs += len(pairs)
        return Sentences.from_lists(
            [self._token_links(*each) for each in zip(pairs, *split, strict=True)]
        )

    def _token_links(
        self, pair: AlignedPair, source_pieces: list[str], target_pieces: list[str]
    ) -> list[int]:
        links = pair.links()
        sides = [np.array(words(pieces)) for pieces in (source_pieces, target_pieces)]
        found = [int(side.max(initial=-1)) + 1 for side in sides]
        if found != [len(text.split()) for text in pair]:
            self._unlinked.append(pair.place)
            return []
        tokens: list[int] = []
        for link in links:
            sources, targets = map(np.flatnonzero, map(np.equal, sides, link))
            tokens += np.stack(np.meshgrid(sources, targets), axis=-1).ravel().tolist()
        return tokens

    def finish(self) -> None:
        """Reports the pairs without links; raises `UserError` if these are all pairs."""
        if not self._unlinked:
            return
        reason = (
            f"{self._name}: {len(self._unlinked):,} of {self._pairs:,} pairs have no links, since "
            "the vocabulary divides their text into other words than the spaces do; the first is "
            f"that of {self._unlinked[0]}"
        )
        if len(self._unlinked) == self._pairs:
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
