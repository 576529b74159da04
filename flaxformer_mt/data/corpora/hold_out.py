"""Development and test pairs that are set aside from the training corpora.

A hash of the source decides, independently of the other pairs and of the position in the file, and
all pairs of a source are on the same side. The share that is held out is a power of two. A file
that grows therefore gives the same held-out pairs, and those of its new pairs that belong to them;
where the share passes to the next power, half of them return to training.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from flaxformer_mt.config.data import HeldOutRole
from flaxformer_mt.data.corpora.corpus import Corpus, Role, SentencePair, StreamedCorpus
from flaxformer_mt.errors import UserError

_HASH_BITS = 64


def hold_out(
    corpora: Sequence[StreamedCorpus], pairs: int, roles: Sequence[HeldOutRole]
) -> dict[str, list[Corpus]]:
    """Returns the part of each training corpus for "train" and for each role.

    About `pairs` pairs of all corpora are held out per role. Their text is read when a part, or its
    fingerprint, is asked for.
    """
    division = Division(corpora, pairs, tuple(roles))
    everything: tuple[Role, ...] = ("train", *roles)
    return {
        role: [_part(division, number, role) for number in range(len(corpora))]
        for role in everything
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """Training corpora, divided into what is trained on and what is held out."""

    corpora: Sequence[StreamedCorpus]
    wanted: int
    """The approximate number of pairs to hold out per role."""
    roles: tuple[HeldOutRole, ...]

    @functools.cached_property
    def bits(self) -> int:
        """One of 2**bits sources is held out per role."""
        total = sum(map(len, self._hashes))
        if total < _FEWEST * self.wanted:
            raise UserError(
                f"data.hold_out={self.wanted} of {total:,} pairs are too many: at most "
                f"{total // _FEWEST:,}"
            )
        return round(math.log2(total / self.wanted))

    def describe(self) -> dict[str, int]:
        """Returns the share that is held out per role, and the number of pairs, for `data.json`."""
        sizes = {str(role): sum(map(len, self.held_out[role])) for role in self.roles}
        return {"one_in": 2**self.bits, **sizes}

    @functools.cached_property
    def held_out(self) -> dict[str, list[list[SentencePair]]]:
        """The pairs of each role, per corpus, without tags.

        They are ordered by their hashes: the first ones are a sample of a file that is sorted.
        """
        pairs: dict[str, list[list[SentencePair]]] = {role: [] for role in self.roles}
        for corpus, hashes in zip(self.corpora, self._hashes, strict=True):
            chosen = self._chosen(hashes)
            texts = list(itertools.compress(corpus.stream(), chosen))
            order = np.argsort(hashes[chosen], kind="stable")
            for role in self.roles:
                mask = self._mask(hashes[chosen], role)
                pairs[role].append([texts[index] for index in order if mask[index]])
        return pairs

    def training_pairs(self, number: int) -> Iterator[SentencePair]:
        """Yields the pairs of a corpus that are not held out."""
        return itertools.compress(
            self.corpora[number].stream(), ~self._chosen(self._hashes[number])
        )

    @functools.cached_property
    def _hashes(self) -> list[np.ndarray]:
        """A hash of each source: uint64 [pairs], per corpus."""
        return [
            # A language model has no sources.
            np.fromiter((_hash(source or target) for source, target in corpus.stream()), np.uint64)
            for corpus in self.corpora
        ]

    def _chosen(self, hashes: np.ndarray) -> np.ndarray:
        return np.logical_or.reduce([self._mask(hashes, role) for role in self.roles])

    def _mask(self, hashes: np.ndarray, role: HeldOutRole) -> np.ndarray:
        # The lowest hashes and the highest: a smaller share of either is a part of a larger one.
        top = hashes >> np.uint64(_HASH_BITS - self.bits)
        return top == np.uint64(0 if role == "valid" else 2**self.bits - 1)


_FEWEST = 4
"""Pairs of the corpora per pair to hold out for a role, so that at least about half is left."""


def _hash(source: str) -> int:
    """Hashes a source. Case and spaces do not matter: their variants are duplicates, too."""
    text = " ".join(source.casefold().split())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_HASH_BITS // 8).digest())


def _part(division: Division, number: int, role: Role) -> StreamedCorpus:
    corpus = division.corpora[number]

    def stream() -> Iterator[SentencePair]:
        if role == "train":
            return division.training_pairs(number)
        return iter(division.held_out[role][number])

    def digest() -> bytes:
        rule = f"{role} of {division.roles}, 1 in {2**division.bits}\n"
        return hashlib.sha256(rule.encode() + corpus.digest()).digest()

    return dataclasses.replace(
        corpus,
        name=f"{corpus.name} without held-out pairs"
        if role == "train"
        else f"held out of {corpus.name}",
        stream=stream,
        digest=digest,
        division=division.describe,
        may_be_empty=role != "train",
    )
