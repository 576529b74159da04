"""What held-out pairs share with training text, which makes their scores too good.

Texts are compared as `comparable` returns them. A held-out pair counts for the strongest kind of
what it shares.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from flaxformer_mt.data.corpora.comparison import comparable, in_chunks
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.filters import shortened
from flaxformer_mt.data.corpora.rows import location_of

PAIR, SOURCE, TARGET = range(3)
"""Kinds: both sides, or one side with another translation."""

Shared: TypeAlias = dict[int, tuple[int, str]]
"""By the number of a held-out pair, from 0: its kind, and the first training pair of this kind."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOutText:
    """The pairs of some corpora, to be found in training text."""

    corpora: Sequence[Corpus]

    @classmethod
    def of(cls, corpora: Sequence[Corpus]) -> "HeldOutText":
        """Returns the text of the corpora that can share anything with training text."""
        # Those that are held out share nothing with what they were held out of.
        return cls([corpus for corpus in corpora if not corpus.may_be_empty])

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that `find` depends on, in hexadecimal."""
        content = [corpus.fingerprint for corpus in self.corpora]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def texts(self) -> list[list[SentencePair]]:
        """The pairs of each corpus, without tags."""
        return [list(corpus.untagged()) for corpus in self.corpora]

    @functools.cached_property
    def _compared(self) -> list[tuple[str, str]]:
        return [compared for _, compared in _with_compared(itertools.chain(*self.texts))]

    @functools.cached_property
    def _equal(self) -> list[dict[str, list[int]]]:
        return [_numbers_by_text(pair[side] for pair in self._compared) for side in (0, 1)]

    def find(
        self,
        pairs: Iterable[SentencePair],
        numbers: Iterable[int],
        is_kept: Callable[[int, SentencePair], bool] = lambda number, pair: True,
    ) -> Shared:
        """Returns what is shared with training pairs.

        Args:
          pairs: the training pairs, without tags.
          numbers: of their rows in their corpus, from 1.
          is_kept: whether a pair is trained on; the others do not count.
        """
        shared: Shared = {}
        sources, targets = self._equal
        if not sources and not targets:
            return shared
        for number, (pair, compared) in zip(numbers, _with_compared(pairs), strict=False):
            if compared[0] not in sources and compared[1] not in targets:
                continue
            found = dict(self._found(compared))
            if found and is_kept(number, pair):
                example = f"{shown(*pair)} ({location_of(pair, number)})"
                add(shared, {held: (kind, example) for held, kind in found.items()})
        return shared

    def _found(self, compared: tuple[str, str]) -> Iterator[tuple[int, int]]:
        """Yields the held-out pairs that share something, with kinds, the strongest one last."""
        found = [texts.get(text, ()) for texts, text in zip(self._equal, compared, strict=True)]
        for kind, numbers in reversed([*zip((SOURCE, TARGET), found, strict=True)]):
            for held in numbers:
                yield held, PAIR if self._compared[held] == compared else kind


NO_TEXT = HeldOutText(())


def add(shared: Shared, later: Shared) -> None:
    """Adds to `shared` what was found in later text of the same corpus."""
    for held, (kind, example) in later.items():
        if held not in shared or kind < shared[held][0]:
            shared[held] = kind, example


def shown(source: str, target: str) -> str:
    """Returns the beginnings of the sides of a pair, for a message."""
    return f"{shortened(source)} | {shortened(target)}" if source else shortened(target)


def _with_compared(
    pairs: Iterable[SentencePair],
) -> Iterator[tuple[SentencePair, tuple[str, str]]]:
    """Yields each pair with its texts as they are compared."""
    for chunk in in_chunks(pairs):
        sources, targets = map(comparable, zip(*chunk, strict=True))
        yield from zip(chunk, zip(sources, targets, strict=True), strict=True)


def _numbers_by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    """Returns the numbers, from 0, of each text that is not empty."""
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        if text:
            numbers.setdefault(text, []).append(number)
    return numbers
