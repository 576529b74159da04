"""On-disk store of training corpora: filtered and tokenized once, then memory-mapped.

The store of a corpus is a folder of flat arrays, each a file without header, and `store.json`,
which lists them:

    source.tokens, source.offsets   the concatenated sources, and their offsets
    target.tokens, target.offsets   the same of the targets
    NAME.values, NAME.offsets       what pairs have beside their texts (see `pair_fields`)
    line.numbers                    the line of each pair, in the files that `store.json` lists
    seen.hashes                     hashes of all pairs so far (with data.drop_duplicates)
    manifest.json                   SHA-256 of all others, verified whenever a store is opened

`store.json` also records what the store was built from; when text, tokenizer or options change, or
a file is damaged, it is rebuilt. Stores are written atomically, so that an interrupted one is never
used. The file `lock` beside them is locked while they are checked, built and opened, so that runs
can share the folder.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import values_with
from flaxformer_mt.config.fields import FieldRole
from flaxformer_mt.data.corpora import shared_text
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.entities import warn_of_notes
from flaxformer_mt.data.corpora.filters import example_of, options_in_use
from flaxformer_mt.data.corpora.rows import Dropped, added_up, location, merged
from flaxformer_mt.data.corpora.shared_text import NO_TEXT, HeldOutText, Shared
from flaxformer_mt.data.stream.encoded_corpus import (
    CorpusReport,
    EncodedCorpus,
    Locations,
    SideReport,
    check_special_ids,
)
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.data.stream.pair_fields import check_fields, field_of
from flaxformer_mt.data.stream.store_parts import Part, Parts, first_occurrences
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import MAX_MODEL_BYTES, parse_json, read_bytes
from flaxformer_mt.run_layout import MANIFEST
from flaxformer_mt.runs.manifest import damage, write_manifest

_LAYOUT = 3  # Version of the layout; stores of other versions are rebuilt.
_PARTS = "parts-"
_SIDES: Mapping[str, str] = {"sources": "source.tokens", "targets": "target.tokens"}
_VALUES = ".values"
_FILES = re.compile(
    r"(source|target)\.(tokens|offsets)|(text|links|column\.\w+)\.(values|offsets)|"
    rf"line\.numbers|seen\.hashes|store\.json|{re.escape(MANIFEST)}"
)

_Origin: TypeAlias = dict[str, Any]
"""The key of a store, as JSON: {"text": ..., "tokenizer": ..., "options": {name: value}}."""

_log = logging.getLogger(__name__)


def open_stores(
    cache_folder: Path,
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    *,
    held_out: HeldOutText = NO_TEXT,
    verify: bool = True,
) -> list[EncodedCorpus]:
    """Opens the stores of the training corpora, and builds those that are missing or out of date.

    If another process is building stores in the same folder, waits for it.

    Args:
      cache_folder: folder of the stores `train-0`, `train-1`, ...; any others are removed.
      corpora: the training corpora, from `open_corpora`.
      tokenizers: the vocabularies.
      config: the experiment, with the options of the filters.
      held_out: the text that is looked for in corpora while they are tokenized.
      verify: whether to compare the checksums of all files. One process does so for all that train
        together.

    Raises:
      UserError: a corpus cannot be read or used, or all of its pairs are dropped; the folder cannot
        be written, or has something else in place of a store.
    """
    check_special_ids(tokenizers, config.model)
    check_fields(corpora, config)
    stores = [
        _Store(cache_folder, corpora[: number + 1], tokenizers, config, held_out)
        for number in range(len(corpora))
    ]
    with _locked(cache_folder):
        folders = [store.folder for store in stores]
        for folder in cache_folder.glob("train-*"):
            if folder in folders:
                if not _is_store(folder):
                    raise UserError(f"{folder} is not a token store: move it elsewhere")
            elif _is_store(folder):
                atomic.delete(folder)
        return [store.open(verify) for store in stores]


def make_parts(
    cache_folder: Path,
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    index: int,
    count: int,
    held_out: HeldOutText = NO_TEXT,
) -> None:
    """Makes every `count`th part of the stores of `open_stores`, from part `index`, if missing.

    Processes can do so at the same time; `open_stores` makes what they have not, and joins all.
    """
    check_special_ids(tokenizers, config.model)
    check_fields(corpora, config)
    for number in range(len(corpora)):
        store = _Store(cache_folder, corpora[: number + 1], tokenizers, config, held_out)
        origin = store.origin()
        if not store.is_usable(origin, verify=False):
            parts = store.parts(origin)
            parts.make(store.corpus, tokenizers, config, held_out, index, count)


def has_parts(cache_folder: Path) -> bool:
    """Whether there are parts of stores that are not joined yet."""
    return any(cache_folder.glob(f"{_PARTS}*/*"))


@contextlib.contextmanager
def _locked(cache_folder: Path) -> Iterator[None]:
    def announce(owner: str) -> None:
        _log.warning("waiting for %s, which is tokenizing in %s", owner, cache_folder)

    with contextlib.ExitStack() as stack:
        with atomic.explained(cache_folder):
            atomic.make_folder(cache_folder)
            stack.enter_context(atomic.locked(cache_folder / "lock", announce))
        yield


def _is_store(folder: Path) -> bool:
    """Returns whether a folder, or its target if it is a link, holds files of a store only."""
    return folder.is_dir() and all(_FILES.fullmatch(path.name) for path in folder.iterdir())


@dataclasses.dataclass(frozen=True)
class _Description:
    """The content of `store.json`."""

    origin: dict[str, Any]
    files: list[str]
    report: CorpusReport
    locations: list[tuple[int, str]]
    shared: dict[str, list[tuple[int, tuple[int, str]]]]


@dataclasses.dataclass(frozen=True)
class _Store:
    """The store of the last of some corpora, in a folder that is locked."""

    cache_folder: Path
    corpora: Sequence[Corpus]
    tokenizers: Tokenizers
    config: ExperimentConfig
    held_out: HeldOutText

    @property
    def folder(self) -> Path:
        return self.cache_folder / f"train-{len(self.corpora) - 1}"

    @property
    def corpus(self) -> Corpus:
        return self.corpora[-1]

    @property
    def relevant(self) -> Sequence[Corpus]:
        # A pair may duplicate one of an earlier corpus.
        return self.corpora if self.config.data.drop_duplicates else self.corpora[-1:]

    def dtype(self, side: str) -> npt.DTypeLike:
        if side not in _SIDES:
            return field_of(side).dtype
        tokenizer = self.tokenizers.source if side == "sources" else self.tokenizers.target
        return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32

    def open(self, verify: bool) -> EncodedCorpus:
        """Maps the arrays, after building them if they are missing or out of date."""
        origin = self.origin()
        if not self.is_usable(origin, verify):
            self._build(origin)
        description = self._description()
        names = [name.removesuffix(_VALUES) for name in description.files if _VALUES in name]
        if _SIDES["sources"] in description.files:
            names.append("sources")
        mapped = {name: self._mapped(name) for name in names}
        return EncodedCorpus(
            mapped.pop("sources", None),
            self._mapped("targets"),
            mapped,
            name=self.corpus.name,
            report=description.report,
            weight=self.corpus.weight,
            locations=Locations(
                _map(self.folder / "line.numbers", np.int64), description.locations
            ),
            shared={text: dict(shared) for text, shared in description.shared.items()},
        )

    def _mapped(self, side: str) -> Sentences:
        path = self.folder / _file_of(side)
        offsets = _map(path.with_suffix(".offsets"), np.int64)
        return Sentences(_map(path, self.dtype(side)), offsets)

    def origin(self) -> _Origin:
        """Returns everything that the store depends on. Row lengths are not part."""
        return {
            "text": [corpus.fingerprint for corpus in self.relevant],
            "tokenizer": [
                self.tokenizers.source.fingerprint,
                self.tokenizers.target.fingerprint,
            ],
            "options": {
                **values_with(self.config, FieldRole.TOKENS),
                # At any rate above 0 the text is stored beside the tokens.
                "data.subword_sampling": self.config.data.subword_sampling > 0,
                "languages": [list(corpus.languages) for corpus in self.relevant],
                "layout": _LAYOUT,
            },
        }

    def is_usable(self, origin: _Origin, verify: bool) -> bool:
        """Returns whether a store is complete and has this origin; otherwise logs the reason."""
        if not self.folder.exists():
            return False
        reason = damage(self.folder, "store") if verify else ""
        try:
            reason = reason or _changes(self._description().origin, origin)
        except UserError as error:
            reason = str(error)
        if reason:
            _log.warning(
                "%s is filtered and tokenized again: in %s, %s",
                self.corpus.name,
                self.folder,
                reason,
            )
        return not reason

    def _description(self) -> _Description:
        path = self.folder / "store.json"
        return parse_json(read_bytes(path, MAX_MODEL_BYTES), str(path), _Description)

    def parts(self, origin: _Origin) -> Parts:
        """The parts that the store is made of."""
        key = json.dumps([origin, self.held_out.fingerprint], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()
        return Parts(self.cache_folder / f"{_PARTS}{len(self.corpora) - 1}", digest)

    def _build(self, origin: _Origin) -> None:
        parts = self.parts(origin)
        parts.make(self.corpus, self.tokenizers, self.config, self.held_out)
        try:
            with atomic.new_folder(self.folder, replace=True) as partial:
                report, files, shared = self._join(parts, partial)
                description = {
                    "origin": origin,
                    "files": sorted(path.name for path in partial.iterdir()),
                    "report": dataclasses.asdict(report),
                    "locations": files,
                    "shared": {self.held_out.fingerprint: [*shared.items()]},
                }
                (partial / "store.json").write_text(
                    json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
                )
                write_manifest(partial)
        finally:
            atomic.delete(parts.folder)

    def _join(
        self, parts: Parts, folder: Path
    ) -> tuple[CorpusReport, list[tuple[int, str]], Shared]:
        """Writes the arrays; returns the report, the files of the pairs, and what they share.

        See `Locations` and `EncodedCorpus.shared`.
        """
        corpus, data = self.corpus, self.config.data
        dropped: dict[str, Dropped] = {}
        malformed: dict[str, Dropped] = {}
        notes: dict[str, Dropped] = {}
        shared: Shared = {}
        files: list[tuple[int, str]] = []
        lengths: dict[str, list[np.ndarray]] = {"sources": [], "targets": []}
        unknown = {"sources": 0, "targets": 0}
        examples = ["", ""]
        written = 0
        for part in self._distinct(parts, folder) if data.drop_duplicates else parts:
            notes = merged([notes, part.notes])
            dropped = added_up(dropped, part.dropped)
            malformed = merged([malformed, part.malformed])
            shared_text.add(shared, part.shared)
            for index, path in part.files:
                if not files or files[-1][1] != path:
                    files.append((written + index, path))
            written += len(part.numbers)
            _append(folder / "line.numbers", part.numbers)
            examples = [
                before or new
                for before, new in zip(examples, part.pairs.unknown_examples, strict=True)
            ]
            for side, sentences in part.pairs.tokens.arrays.items():
                if side in lengths:
                    lengths[side].append(sentences.lengths)
                    unknown[side] += int(np.count_nonzero(sentences.tokens == self._unknown(side)))
                values = sentences.tokens.astype(self.dtype(side))
                _append_ragged(folder / _file_of(side), values, sentences.offsets)

        warn_of_notes(corpus.name, notes)
        dropped = {**malformed, **dropped}
        read = written + sum(reason.count for reason in dropped.values())
        if not written:
            reasons = ", ".join(f"{pairs.count:,} {reason}" for reason, pairs in dropped.items())
            filters = options_in_use(data)
            advice = f"; the filters are {filters}" if filters else ""
            raise UserError(f"{corpus.name}: all of {read:,} pairs were dropped: {reasons}{advice}")
        for name in corpus.fields:
            field_of(name).tell(corpus.name, written, notes)
        sources, targets = (
            SideReport.of_lengths(
                np.concatenate(lengths[side]),
                unknown_tokens=unknown[side],
                unknown_example=example,
                unknown_id=self._unknown(side),
            )
            if lengths[side]
            else None
            for side, example in zip(lengths, examples, strict=True)
        )
        assert targets is not None
        report = CorpusReport(read, dropped, sources, targets)
        return report, files, shared

    def _unknown(self, side: str) -> int:
        tokenizers = self.tokenizers
        return (tokenizers.source if side == "sources" else tokenizers.target).unk_id

    def _distinct(self, parts: Parts, folder: Path) -> Iterator[Part]:
        """Yields the parts without pairs that occur before, and writes the hashes of all pairs."""
        earlier = np.empty(0, np.uint64)
        if len(self.relevant) > 1:
            name = f"train-{len(self.corpora) - 2}"
            earlier = _map(self.cache_folder / name / "seen.hashes", np.uint64)
        is_first, seen = first_occurrences(parts, earlier)
        for hashes in seen:
            _append(folder / "seen.hashes", hashes)
        before = 0
        for part in parts:
            kept = is_first[before : before + len(part.numbers)]
            before += len(kept)
            repeated = np.flatnonzero(~kept)
            dropped = {}
            if len(repeated):
                dropped["duplicate"] = Dropped(len(repeated), self._example(part, int(repeated[0])))
            yield part.only(kept, dropped)

    def _example(self, part: Part, index: int) -> str:
        """Describes a pair; its text is that of its tokens."""
        tokens, tokenizers = part.pairs.tokens, self.tokenizers
        texts = [
            tokenizer.decode([sentences[index].tolist()])[0] if sentences is not None else ""
            for sentences, tokenizer in (
                (tokens.sources, tokenizers.source),
                (tokens.targets, tokenizers.target),
            )
        ]
        source, target = texts
        if self.corpus.tag:
            source = source.removeprefix(f"{self.corpus.tag} ")
        return example_of(location(part.path(index), int(part.numbers[index])), source, target)


def _changes(stored: _Origin, wanted: _Origin) -> str:
    parts = [f"the {part}" for part in ("text", "tokenizer") if stored[part] != wanted[part]]
    options = [
        name for name, value in wanted["options"].items() if stored["options"].get(name) != value
    ]
    changes = parts + options
    return f"{', '.join(changes)} changed" if changes else ""


def _file_of(side: str) -> str:
    """Returns the file of an array of `TokenPairs`; its offsets are beside it."""
    return _SIDES.get(side, side + _VALUES)


def _append_ragged(path: Path, values: np.ndarray, offsets: np.ndarray) -> None:
    """Appends [N] values to a file, and int64 offsets, which are from 0 to N, to that beside it."""
    offsets_path = path.with_suffix(".offsets")
    if not path.exists():
        _append(path, values[:0])
        _append(offsets_path, offsets[:1])
    _append(offsets_path, offsets[1:] + path.stat().st_size // values.itemsize)
    _append(path, values)


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())


def _map(path: Path, dtype: npt.DTypeLike) -> np.ndarray:
    # A plain array over the mapped file: numpy operations on `np.memmap` are slower.
    return np.asarray(np.memmap(path, dtype, mode="r"))
