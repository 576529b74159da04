"""Parts of a token store: what several processes make, and what is left after a kill.

A part has the pairs of `ROWS` consecutive rows of a corpus that pass its filters. Each is a folder
of arrays, written atomically, so that the parts that are missing can be made by any process, in any
order; of text files, a process reads only the rows of its parts. `end.json` has the number of
parts, which a process knows that has come to the end of the corpus. Duplicates are found when the
parts are joined, because they depend on all of them.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import Chunk, Corpus, SentencePair
from flaxformer_mt.data.corpora.entities import notes_of
from flaxformer_mt.data.corpora.filters import PairFilter, pair_hash
from flaxformer_mt.data.corpora.rows import Dropped, Row, added_up
from flaxformer_mt.data.corpora.shared_text import HeldOutText, Shared
from flaxformer_mt.data.corpora.text_files import counted
from flaxformer_mt.data.stream.encoded_corpus import EncodedPairs, encode_pairs
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.data.stream.pair_fields import fields_of
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import Count, read_json

ROWS = 20_000
_HASHES_AT_ONCE = 2**23
_ARRAYS, _VALUES_FILE, _END_FILE = "arrays.npz", "part.json", "end.json"
_HASHES, _ORDER = "hashes.npy", "order.npy"
"""Sorted hashes of the pairs, and the index of each; none if duplicates are kept."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The pairs of a part of a corpus that its filters keep."""

    pairs: EncodedPairs
    numbers: np.ndarray
    """The line of each pair in its file, or its number in the corpus, int64 [N]."""
    files: Sequence[tuple[int, str]]
    """The index of the first pair of each file, and its name; "" if there is no file."""
    dropped: Mapping[str, Dropped]
    notes: Mapping[str, Dropped]
    """The pairs with HTML entities, and those that lack values of a field."""
    malformed: Mapping[str, Dropped]
    shared: Shared

    def path(self, index: int) -> str:
        """Returns the file that a pair was read from; "" if there is none."""
        return [name for first, name in self.files if first <= index][-1]

    def only(self, kept: np.ndarray, dropped: Mapping[str, Dropped]) -> "Part":
        """Returns the part without pairs that are `dropped`; `kept` is bool [N]."""
        indices = np.flatnonzero(kept)
        return dataclasses.replace(
            self,
            pairs=self.pairs._replace(tokens=self.pairs.tokens.take(indices)),
            numbers=self.numbers[indices],
            files=[(int(indices.searchsorted(index)), name) for index, name in self.files],
            dropped=added_up(self.dropped, dropped),
        )


@dataclasses.dataclass(frozen=True)
class _Values:
    """What is recorded of a part beside its arrays."""

    origin: str
    files: Sequence[tuple[int, str]]
    dropped: Mapping[str, Dropped]
    notes: Mapping[str, Dropped]
    malformed: Mapping[str, Dropped]
    shared: list[tuple[int, tuple[int, str]]]
    unknown_examples: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _End:
    origin: str
    parts: Count


_Recorded = TypeVar("_Recorded", _Values, _End)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a store that have an origin, in a folder.

    Args:
      folder: the folder; it need not exist.
      origin: identifies all that the parts depend on. Parts with another one are made again.
    """

    folder: Path
    origin: str

    def make(
        self,
        corpus: Corpus,
        tokenizers: Tokenizers,
        config: ExperimentConfig,
        held_out: HeldOutText,
        first: int = 0,
        step: int = 1,
    ) -> None:
        """Makes the parts first, first + step, ... that are missing.

        Raises:
          UserError: the corpus or a part of it cannot be read, or the folder cannot be written.
        """
        end = self._end()
        if end is not None and all(map(self._has, range(first, end.parts, step))):
            return
        chunks = corpus.chunks(
            ROWS, lambda number: number % step == first and not self._has(number)
        )
        chunks = counted(chunks, f"tokenizing {corpus.name}", f"parts of {ROWS:,} pairs")
        count = 0
        for count, chunk in enumerate(chunks, start=1):
            if chunk is not None:
                self._write(count - 1, *_made(chunk, corpus, tokenizers, config, held_out))
        values = {"origin": self.origin, "parts": count}
        atomic.write_text(self.folder / _END_FILE, json.dumps(values))

    def pairs_within(self, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the hashes of pairs in a range that includes its ends, and which pairs they are.

        Both are [N], for each part in turn; pairs are numbered through all parts. Only what is in
        the range is read.
        """
        limits = np.array([low, high], np.uint64)
        before = 0
        for number in range(self._all().parts):
            path = self._path(number)
            hashes, order = (np.load(path / name, mmap_mode="r") for name in (_HASHES, _ORDER))
            first = int(hashes.searchsorted(limits[0]))
            last = int(hashes.searchsorted(limits[1], side="right"))
            yield np.array(hashes[first:last]), order[first:last] + np.int64(before)
            before += len(hashes)

    def count(self) -> int:
        """Returns the number of pairs with hashes in all parts."""
        return sum(
            len(np.load(self._path(number) / _HASHES, mmap_mode="r"))
            for number in range(self._all().parts)
        )

    def __iter__(self) -> Iterator[Part]:
        """Reads the parts of a corpus that is read completely, in order."""
        for number in range(self._all().parts):
            yield self._read(number)

    def _all(self) -> _End:
        end = self._end()
        assert end is not None, "the corpus was not read completely"
        return end

    def _end(self) -> _End | None:
        return self._of_origin(self.folder / _END_FILE, _End)

    def _has(self, number: int) -> bool:
        return self._of_origin(self._path(number) / _VALUES_FILE, _Values) is not None

    def _of_origin(self, path: Path, kind: type[_Recorded]) -> _Recorded | None:
        if not path.is_file():
            return None
        with contextlib.suppress(UserError):  # What is damaged is made again.
            values: _Recorded = read_json(path, kind)
            return values if values.origin == self.origin else None
        return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06}"

    def _write(self, number: int, part: Part, hashes: np.ndarray) -> None:
        values = _Values(
            self.origin,
            part.files,
            part.dropped,
            part.notes,
            part.malformed,
            [*part.shared.items()],
            part.pairs.unknown_examples,
        )
        arrays = {"numbers": part.numbers}
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        for name, sentences in part.pairs.tokens.arrays.items():
            arrays |= {f"{name}.tokens": sentences.tokens, f"{name}.offsets": sentences.offsets}
        with atomic.new_folder(self._path(number), replace=True) as folder:
            np.savez(folder / _ARRAYS, allow_pickle=False, **arrays)
            np.save(folder / _HASHES, hashes[order])
            np.save(folder / _ORDER, order)
            text = json.dumps(dataclasses.asdict(values))
            (folder / _VALUES_FILE).write_text(text, encoding="utf-8")

    def _read(self, number: int) -> Part:
        values = self._of_origin(self._path(number) / _VALUES_FILE, _Values)
        assert values is not None
        with np.load(self._path(number) / _ARRAYS) as file:
            arrays = dict(file)
        named = {
            name: Sentences(values, arrays[f"{name}.offsets"])
            for key, values in arrays.items()
            for name, _, kind in [key.rpartition(".")]
            if kind == "tokens"
        }
        tokens = TokenPairs(named.pop("sources", None), named.pop("targets"), named)
        return Part(
            EncodedPairs(tokens, values.unknown_examples),
            arrays["numbers"],
            values.files,
            values.dropped,
            values.notes,
            values.malformed,
            dict(values.shared),
        )


def first_occurrences(parts: Parts, earlier: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Finds the pairs that occur neither before nor in earlier corpora.

    Hashes are compared in ranges, each of which is read once, so that time and memory are linear in
    the number of pairs: some 20 bytes of memory each.

    Args:
      parts: those of a corpus that is read completely.
      earlier: sorted hashes of the pairs of earlier corpora, uint64 [N].

    Returns:
      Whether each pair of all parts is the first of its kind, bool [pairs], and the hashes of all
      pairs so far, sorted, in pieces.
    """
    is_first = np.zeros(parts.count(), np.bool_)
    seen = []
    width = 2**64 // 2 ** (len(is_first) // _HASHES_AT_ONCE).bit_length()
    for low in range(0, 2**64, width):
        found = list(parts.pairs_within(low, low + width - 1))
        hashes = np.concatenate([each for each, _ in found])
        indices = np.concatenate([each for _, each in found])
        known = earlier[earlier.searchsorted(np.uint64(low)) :]
        known = known[: known.searchsorted(np.uint64(low + width - 1), side="right")]
        distinct, first = np.unique(hashes, return_index=True)
        is_new = ~np.isin(distinct, known, assume_unique=True, kind="sort")
        is_first[indices[first[is_new]]] = True
        seen.append(np.union1d(known, distinct))
    return is_first, seen


def _made(
    chunk: Chunk,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    held_out: HeldOutText,
) -> tuple[Part, np.ndarray]:
    """Filters and encodes the pairs of a part, and hashes them if duplicates are dropped."""
    data, has_inputs = config.data, config.model.has_inputs
    pair_filter = PairFilter(data, corpus, has_inputs)
    kept: list[SentencePair] = []
    numbers: list[int] = []
    files: list[tuple[int, str]] = []
    for number, pair in zip(chunk.numbers, chunk.pairs, strict=True):
        if pair_filter.keep(number, pair):
            path = str(pair.path or "") if isinstance(pair, Row) else ""
            if not files or files[-1][1] != path:
                files.append((len(kept), path))
            kept.append(pair)
            numbers.append(pair.number if isinstance(pair, Row) else number)
    # With its tag: another one makes another pair of it.
    hashes = [pair_hash(*pair) for pair in (kept if data.drop_duplicates else [])]
    pairs = encode_pairs(kept, tokenizers, has_inputs, fields_of(corpus, config))
    part = Part(
        pairs,
        np.array(numbers, np.int64),
        files,
        pair_filter.dropped,
        {
            **notes_of(chunk.pairs, chunk.numbers),
            **pairs.notes,
        },
        chunk.malformed,
        held_out.find(corpus.untagged(kept), numbers),
    )
    return part, np.array(hashes, np.uint64)
