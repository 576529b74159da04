"""Development and test pairs that are set aside from the training corpora.

A hash of the source decides, independently of the position in the file: the lowest hashes are
validated on, and the highest are the test. Pairs that share their source or their target with a
held-out pair are left out of the training, whichever corpus they are in. Texts are equal if they
are so as `comparison.comparable` returns them.
"""

import array
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.config.data import HeldOutRole
from flaxformer_mt.data.corpora.comparison import hashed, in_chunks
from flaxformer_mt.data.corpora.corpus import Corpus, Role, SentencePair, StreamedCorpus
from flaxformer_mt.data.corpora.filters import PairFilter, options_in_use
from flaxformer_mt.data.corpora.rows import Reading, Row, located
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.manifest import made_once

_TRAIN, _LEFT_OUT, _MALFORMED = 0, -1, -2
"""Numbers of what is no held-out role; these are counted from 1."""

_FEWEST = 4
"""Pairs of the corpora per pair to hold out for a role, so that at least about half is left."""

_MOST_LEFT_OUT = 10
"""The distinct pairs of the corpora per pair that may be left out of training for a role."""

_MOST_OF_A_SOURCE = 8
"""Number of lines of a source up to which all are held out together."""

_LINE = np.dtype([("source", np.uint64), ("target", np.uint64), ("passes", np.bool_)])
"""The keys of the sides of a line, and whether the pair may be held out."""

_log = logging.getLogger(__name__)


def hold_out(
    corpora: Sequence[StreamedCorpus],
    config: DataConfig,
    has_inputs: bool = True,
    cache_folder: Path | None = None,
) -> dict[str, list[Corpus]]:
    """Returns the part of each training corpus for "train" and for each of `held_out_roles`.

    Corpora that no pairs are held out of have a part for "train" only. Their text is read when the
    text of a part is asked for, unless the cache folder has its division.
    """
    division = Division(corpora, config, has_inputs, cache_folder)
    everything: tuple[Role, ...] = ("train", *division.roles)
    giving = {number for numbers, _, _ in division.quotas for number in numbers}
    return {
        role: [
            _part(division, number, role)
            for number in range(len(corpora))
            if role == "train" or number in giving
        ]
        for role in everything
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """Training corpora, divided into what is trained on and what is held out."""

    corpora: Sequence[StreamedCorpus]
    config: DataConfig
    has_inputs: bool = True
    cache_folder: Path | None = None
    """Where the division is kept for other processes and later starts; None = it is not."""

    @functools.cached_property
    def roles(self) -> tuple[HeldOutRole, ...]:
        """The roles that pairs are held out for."""
        return tuple(self.config.held_out_roles)

    @functools.cached_property
    def quotas(self) -> list[tuple[list[int], int, str]]:
        """Indices of corpora, the number of pairs to hold out of them per role, and its option."""
        config = self.config
        common: list[int] = []
        quotas = [(common, config.hold_out, "data.hold_out")]
        for number, corpus in enumerate(config.train_corpora or (CorpusConfig(),)):
            if corpus.shares_hold_out:
                common.append(number)
            else:
                option = f"data.train_corpora.{number}.hold_out"
                quotas.append(([number], corpus.hold_out, option))
        return [quota for quota in quotas if quota[0] and quota[1] > 0]

    def describe(self, number: int) -> dict[str, int]:
        """Returns how many lines a corpus has, and how many of them are for each role."""
        roles = self.divided.roles[number]
        names: dict[int, str] = {**dict(self._numbered), _TRAIN: "train", _LEFT_OUT: "left_out"}
        counts = {name: int((roles == role).sum()) for role, name in names.items()}
        return {"lines": sum(counts.values()), **counts}

    @functools.cached_property
    def divided(self) -> "_Divided":
        """The role of each row, and the pairs that are held out."""
        if self.cache_folder is None:
            return self._divide()
        return made_once(
            self.cache_folder / "division",
            origin=self._digest.hex(),
            activity="choosing the pairs to hold out",
            make=lambda partial: self._divide().save(partial),
            load=lambda folder: _Divided.load(folder, len(self.corpora)),
        )

    def _divide(self) -> "_Divided":
        pairs: dict[str, list[list[SentencePair]]] = {role: [] for role in self.roles}
        roles_of_rows = []
        for corpus, (roles, hashes) in zip(self.corpora, self._roles, strict=True):
            chosen = roles > 0
            texts: list[SentencePair] = []
            roles_of_rows.append(roles)
            if chosen.any() or corpus.malformed():
                texts, roles_of_rows[-1] = _chosen_rows(corpus, roles)
            order = np.argsort(hashes[chosen], kind="stable")
            for index, role in self._numbered:
                is_of_role = roles[chosen] == index
                pairs[role].append([texts[row] for row in order if is_of_role[row]])
        return _Divided(roles_of_rows, pairs)

    def training_rows(self, number: int, reading: Reading) -> Iterator[SentencePair | None]:
        """Yields the pairs of a corpus that are trained on, if they pass the filters.

        It yields None for its other rows.
        """
        in_training = self.divided.roles[number] == _TRAIN
        rows = self.corpora[number].stream(reading)
        return (row if is_in else None for row, is_in in zip(rows, in_training, strict=True))

    def digest(self, number: int, role: Role) -> bytes:
        """Returns the SHA-256 of all that determines the part of a corpus for a role."""
        return hashlib.sha256(f"{role} of {number}\n".encode() + self._digest).digest()

    @functools.cached_property
    def _digest(self) -> bytes:
        config = self.config
        rule = [self.roles, self.quotas, self.has_inputs, config.filter_held_out]
        if config.filter_held_out:
            languages = [corpus.languages for corpus in self.corpora]
            rule += [
                *(config.max_words, config.max_length_ratio, config.drop_identical),
                config.drop_wrong_script and languages,
            ]
            if config.drop_wrong_language:
                rule += [config.drop_wrong_language, languages]
        texts = b"".join(corpus.digest() for corpus in self.corpora)
        return hashlib.sha256(f"{rule}\n".encode() + texts).digest()

    @property
    def _numbered(self) -> Iterator[tuple[int, HeldOutRole]]:
        return enumerate(self.roles, start=1)

    @functools.cached_property
    def _roles(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The role of each pair, and its hash: int8 and uint64 [pairs], per corpus."""
        lines = [self._read(number) for number in range(len(self.corpora))]
        roles = self._by_sides(lines)
        ends = np.cumsum([len(part) for part in lines])[:-1]
        hashes = _hashes(np.concatenate(lines))
        return list(zip(np.split(roles, ends), np.split(hashes, ends), strict=True))

    def _read(self, number: int) -> np.ndarray:
        corpus = self.corpora[number]
        untagged = dataclasses.replace(corpus, tag="")
        passes = PairFilter(self.config, untagged, self.has_inputs).keep
        gives = any(number in numbers for numbers, *_ in self.quotas)
        is_filtered = gives and self.config.filter_held_out
        nowhere = itertools.repeat(0)  # What is dropped here is not reported.
        chunks = [np.empty(0, _LINE)]
        for pairs in in_chunks(corpus.untagged()):
            sources, targets = zip(*pairs, strict=True)
            lines = np.empty(len(pairs), _LINE)
            lines["source"], lines["target"] = hashed(sources), hashed(targets)
            lines["passes"] = not is_filtered or [
                *map(passes, nowhere, zip(sources, targets, strict=True))
            ]
            chunks.append(lines)
        return np.concatenate(chunks)

    def _by_sides(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Chooses pairs, each role in turn, that share no side with those of another role."""
        lines = np.concatenate(parts)
        owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        gives = np.isin(owners, [number for numbers, *_ in self.quotas for number in numbers])
        roles = np.zeros(len(lines), np.int8)
        shares = np.zeros(len(lines), np.bool_)
        frequency = np.maximum(*(_frequencies(lines[side], gives) for side in ("source", "target")))
        for index, role in self._numbered:
            for numbers, wanted, option in self.quotas:
                is_own = np.isin(owners, numbers)
                usable = is_own & lines["passes"] & (_hashes(lines) != 0)
                most = int(usable.sum()) // _FEWEST
                if most < wanted:
                    raise UserError(self._too_many(option, wanted, most, numbers))
                free = np.flatnonzero(usable & ~shares)
                own = np.flatnonzero(is_own)
                is_distinct = np.zeros(len(lines), np.bool_)
                is_distinct[own] = _firsts(_pair_keys(lines[own]))
                chosen = self._choose(
                    lines[free],
                    frequency[free],
                    *(_Shared.of(lines, counted, free) for counted in (is_own, is_distinct)),
                    wanted=wanted,
                    budgets=(most, int(is_distinct.sum()) // _MOST_LEFT_OUT),
                    from_below=role == "valid",
                )
                if len(chosen) < 0.9 * wanted:
                    self._report_shortage(option, wanted, role, len(chosen), int(usable.sum()))
                roles[free[chosen]] = index
                held = lines[roles > 0]
                shares = _among(lines["source"], held["source"])
                shares |= _among(lines["target"], held["target"])
        roles[shares & (roles == _TRAIN)] = _LEFT_OUT
        return roles

    def _choose(
        self,
        lines: np.ndarray,
        frequency: np.ndarray,
        own: "_Shared",
        distinct: "_Shared",
        *,
        wanted: int,
        budgets: tuple[int, int],
        from_below: bool,
    ) -> np.ndarray:
        """Returns the indices of at most `wanted` lines that leave the training intact.

        Frequent sources and targets come last, the rarest of them first, with one pair each. What
        they cost is the lines of the same corpora with the same source or target, `own`. The
        `budgets` are of these and, of the distinct pairs among them, of those that are left out.
        """
        limit = min(max(wanted // 10, 1), _MOST_OF_A_SOURCE)
        hashes = _hashes(lines)
        hashes = hashes if from_below else ~hashes
        order = np.lexsort((hashes, np.where(frequency > limit, frequency, 0)))
        lines, is_frequent = lines[order], frequency[order] > limit
        kept = ~is_frequent | (_firsts(lines["source"]) & _firsts(lines["target"]))
        if self.config.filter_held_out:
            kept &= _firsts(_pair_keys(lines))
        order, is_frequent = order[kept], is_frequent[kept]
        # The lines of a rare source are held out together.
        costs, others = (
            np.maximum(each.targets[order], 1) + np.where(is_frequent, each.sources[order], 0)
            for each in (own, distinct)
        )
        own_pairs = 1 + (is_frequent & (distinct.sources[order] > 0))
        is_left = np.cumsum(np.maximum(others - own_pairs, 0)) <= budgets[1]
        return order[is_left & (np.cumsum(costs) <= budgets[0])][:wanted]

    def _too_many(self, option: str, wanted: int, most: int, numbers: Sequence[int]) -> str:
        names = ", ".join(self.corpora[number].name for number in numbers)
        if not most:
            filters = options_in_use(self.config) if self.config.filter_held_out else ""
            loosen = f", loosen the filters ({filters})" if filters else ""
            return (
                f"{option}={wanted}: {names} has fewer than {_FEWEST} pairs that can be held out: "
                f"give more text{loosen}, or a development set (data.valid_corpora)"
            )
        return (
            f"{option}={wanted} of {names} are too many pairs: at most {most:,}, a quarter of "
            "those that may be held out: lower it, or give more text"
        )

    def _report_shortage(
        self, option: str, wanted: int, role: HeldOutRole, held: int, usable: int
    ) -> None:
        message = (
            f"{option}={wanted}: of {usable:,} pairs, {held:,} are held out for {role}, since most "
            "sources or targets occur in many lines, which could not be trained on (at most one of "
            f"{_MOST_LEFT_OUT} pairs is left out): ask for fewer, give text with fewer "
            "repetitions, or a development set (data.valid_corpora)"
        )
        if not held:
            raise UserError(message)
        _log.warning(message)


_ODD = np.uint64(0x9E3779B97F4A7C15)
"""A factor that makes the hash of a pair depend on which side a text is on."""


def _pair_keys(lines: np.ndarray) -> np.ndarray:
    return lines["source"] * _ODD + lines["target"]


class _Shared(NamedTuple):
    """How many of the lines that are counted have the source, and the target, of some lines."""

    sources: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(cls, lines: np.ndarray, is_counted: np.ndarray, indices: np.ndarray) -> "_Shared":
        sides = (_frequencies(lines[side], is_counted)[indices] for side in ("source", "target"))
        return cls(*sides)


@dataclasses.dataclass(frozen=True)
class _Divided:
    """Where each row of some corpora belongs."""

    roles: Sequence[np.ndarray]
    """The role of each row of a corpus, int8 [rows]."""
    held_out: Mapping[str, Sequence[Sequence[SentencePair]]]
    """The pairs of each role, per corpus, without tags.

    They are ordered by their hashes: the first ones are a sample of a file that is sorted.
    """

    def save(self, folder: Path) -> None:
        for number, roles in enumerate(self.roles):
            np.save(folder / f"{number}.npy", roles)
        values = {
            role: [[_to_json(pair) for pair in of_corpus] for of_corpus in of_role]
            for role, of_role in self.held_out.items()
        }
        (folder / _HELD_OUT).write_text(json.dumps(values))

    @classmethod
    def load(cls, folder: Path, count: int) -> "_Divided":
        """Reads the division of `count` corpora."""
        roles = [np.load(folder / f"{number}.npy") for number in range(count)]
        values = json.loads((folder / _HELD_OUT).read_text())
        held_out = {
            role: [[_from_json(*pair) for pair in of_corpus] for of_corpus in of_role]
            for role, of_role in values.items()
        }
        return cls(roles, held_out)


def _chosen_rows(
    corpus: StreamedCorpus, roles: np.ndarray
) -> tuple[list[SentencePair], np.ndarray]:
    """Returns the pairs of a corpus that are held out, and the roles of all rows, int8 [rows].

    `roles` are those of its pairs.
    """
    texts, of_rows, rest = [], array.array("b"), iter(roles)
    for row in corpus.stream(Reading(corpus.drops_malformed, corpus.name)):
        of_rows.append(_MALFORMED if row is None else next(rest))
        if row is not None and of_rows[-1] > 0:
            texts.append(row)
    return texts, np.array(of_rows)


_HELD_OUT = "held_out.json"


def _to_json(pair: SentencePair) -> tuple[str, str, str, int]:
    return (*pair, *((str(pair.path or ""), pair.number) if isinstance(pair, Row) else ("", 0)))


def _from_json(source: str, target: str, path: str, number: int) -> SentencePair:
    texts = source, target
    return located(texts, Path(path) if path else None, number) if number else texts


def _hashes(lines: np.ndarray) -> np.ndarray:
    """Returns the keys of the sources; of a language model, which has none, of the targets."""
    return np.where(lines["source"] == 0, lines["target"], lines["source"])


def _frequencies(keys: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """Returns in how many of the counted lines each key occurs; 0 for empty text."""
    known, counts = np.unique(keys[is_counted], return_counts=True)
    if not len(known):
        return np.zeros(len(keys), np.int64)
    indices = np.minimum(known.searchsorted(keys), len(known) - 1)
    return np.where((known[indices] == keys) & (keys != 0), counts[indices], 0)


def _firsts(keys: np.ndarray) -> np.ndarray:
    """Returns which keys occur first, or are those of empty text."""
    is_first = keys == 0
    is_first[np.unique(keys, return_index=True)[1]] = True
    return is_first


def _among(keys: np.ndarray, few: np.ndarray) -> np.ndarray:
    """Returns which keys are among a few others, and not those of empty text."""
    few = np.unique(few[few != 0])
    if not len(few):
        return np.zeros(len(keys), np.bool_)
    return few[np.minimum(few.searchsorted(keys), len(few) - 1)] == keys


def _part(division: Division, number: int, role: Role) -> StreamedCorpus:
    corpus = division.corpora[number]

    def stream(reading: Reading) -> Iterator[SentencePair | None]:
        if role == "train":
            return division.training_rows(number, reading)
        return iter(division.divided.held_out[role][number])

    return dataclasses.replace(
        corpus,
        name=f"{corpus.name} without held-out pairs"
        if role == "train"
        else f"held out of {corpus.name}",
        stream=stream,
        digest=functools.partial(division.digest, number, role),
        division=functools.partial(division.describe, number),
        may_be_empty=role != "train",
    )
