"""On-disk store of training corpora: filtered and tokenized once, then memory-mapped.

The store of a corpus is a folder of flat arrays, each a file without header, and `store.json`,
which lists them:

    source.tokens, source.offsets   the concatenated sources, and their offsets
    target.tokens, target.offsets   the same of the targets
    text.bytes, text.offsets        the text of the sources (with data.subword_sampling)
    links.pairs, links.offsets      the links of the tokens (with data.alignments)
    seen.hashes                     hashes of all pairs so far (with data.drop_duplicates)
    manifest.json                   SHA-256 of all others, verified whenever a store is opened

`store.json` also records what the store was built from; when text, tokenizer or options change, or
a file is damaged, it is rebuilt. Stores are written atomically, so that an interrupted one is never
used. The file `lock` beside them is locked while they are checked, built and opened, so that runs
can share the folder.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import values_with
from flaxformer_mt.config.fields import FieldRole
from flaxformer_mt.data.corpora.alignments import AlignedPair
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.filters import PairFilter, SeenPairs
from flaxformer_mt.data.corpora.text_files import counted
from flaxformer_mt.data.stream.encoded_corpus import (
    CorpusReport,
    EncodedCorpus,
    SideEncoder,
    Texts,
    check_special_ids,
)
from flaxformer_mt.data.stream.links import LinkEncoder
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic
from flaxformer_mt.runs.layout import MANIFEST
from flaxformer_mt.runs.manifest import damage, write_manifest

_LAYOUT = 1  # Version of the layout; stores of other versions are rebuilt.
_CHUNK = 20_000  # Pairs held in memory as text.
_FILES = {
    *("source.tokens", "source.offsets", "target.tokens", "target.offsets"),
    *("links.pairs", "links.offsets"),
    *("text.bytes", "text.offsets", "seen.hashes", "store.json", MANIFEST),
}

_Origin: TypeAlias = dict[str, Any]
"""The key of a store, as JSON: {"text": ..., "tokenizer": ..., "options": {name: value}}."""

_log = logging.getLogger(__name__)


def open_stores(
    cache_folder: Path,
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    *,
    verify: bool = True,
) -> list[EncodedCorpus]:
    """Opens the stores of the training corpora, and builds those that are missing or out of date.

    If another process is building stores in the same folder, waits for it.

    Args:
      cache_folder: folder of the stores `train-0`, `train-1`, ...; any others are removed.
      corpora: the training corpora, from `open_corpora`.
      tokenizers: the vocabularies.
      config: the experiment, with the options of the filters.
      verify: whether to read all of the stores and compare their checksums. One process does so for
        all that train together.

    Raises:
      UserError: model and tokenizer disagree on special ids; alignments cannot be used; a corpus
        cannot be read, or all of its pairs are dropped; the folder cannot be written, or has
        something else in place of a store.
    """
    check_special_ids(tokenizers, config)
    _check_alignments(corpora, config)
    with _locked(cache_folder):
        return _open_stores(cache_folder, corpora, tokenizers, config, verify)


def _check_alignments(corpora: Sequence[Corpus], config: ExperimentConfig) -> None:
    aligned = [corpus.is_aligned for corpus in corpora]
    if any(aligned):
        if not all(aligned):
            raise UserError("either all corpora that are mixed have alignments, or none")
        if config.data.subword_sampling:
            raise UserError(
                f"data.subword_sampling={config.data.subword_sampling} cannot be used with "
                "alignments, which link the tokens of one segmentation: set it to 0"
            )
        if not config.model.has_inputs:
            raise UserError("a language model has no sources to align: leave the alignments out")


@contextlib.contextmanager
def _locked(cache_folder: Path) -> Iterator[None]:
    def announce(owner: str) -> None:
        _log.warning("waiting for %s, which is tokenizing in %s", owner, cache_folder)

    with contextlib.ExitStack() as stack:
        with atomic.explained(cache_folder):
            cache_folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic.locked(cache_folder / "lock", announce))
        yield


def _open_stores(
    cache_folder: Path,
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    verify: bool,
) -> list[EncodedCorpus]:
    """As `open_stores`, in a folder that is locked."""
    folders = [cache_folder / f"train-{number}" for number in range(len(corpora))]
    for folder in cache_folder.glob("train-*"):
        if folder in folders:
            if not _is_store(folder):
                raise UserError(f"{folder} is not a token store: move it elsewhere")
        elif _is_store(folder):
            atomic.delete(folder)
    stores = []
    for number, (folder, corpus) in enumerate(zip(folders, corpora, strict=True)):
        origin = _origin(corpora[: number + 1], tokenizers, config)
        if not _is_usable(folder, origin, corpus.name, verify):
            seen = SeenPairs()
            if number and config.data.drop_duplicates:
                seen = SeenPairs(_map(folders[number - 1] / "seen.hashes", np.uint64))
            _make(folder, origin, corpus, tokenizers, config, seen)
        stores.append(_read(folder, corpus, tokenizers))
    return stores


def _origin(corpora: Sequence[Corpus], tokenizers: Tokenizers, config: ExperimentConfig) -> _Origin:
    """Returns everything that the store of the last corpus depends on. Row lengths are not part."""
    # A pair may duplicate one of an earlier corpus.
    relevant = corpora if config.data.drop_duplicates else corpora[-1:]
    return {
        "text": [corpus.fingerprint for corpus in relevant],
        "tokenizer": [tokenizers.source.fingerprint, tokenizers.target.fingerprint],
        "options": {
            **values_with(config, FieldRole.TOKENS),
            # At any rate above 0 the text is stored beside the tokens.
            "data.subword_sampling": config.data.subword_sampling > 0,
            "languages": [list(corpus.languages) for corpus in relevant],
            "layout": _LAYOUT,
        },
    }


def _is_store(folder: Path) -> bool:
    """Returns whether a folder, or its target if it is a link, holds files of a store only."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= _FILES


def _is_usable(folder: Path, origin: _Origin, name: str, verify: bool) -> bool:
    """Returns whether a store is complete and has this origin; otherwise logs the reason."""
    if not folder.exists():
        return False
    damaged = damage(folder, "store") if verify else ""
    reason = damaged or _changes(_description(folder)["origin"], origin)
    if reason:
        _log.warning("%s is filtered and tokenized again: in %s, %s", name, folder, reason)
    return not reason


def _changes(stored: _Origin, wanted: _Origin) -> str:
    """Describes the parts and options in which two origins differ; "" if they are equal."""
    parts = [f"the {part}" for part in ("text", "tokenizer") if stored[part] != wanted[part]]
    options = [
        name for name, value in wanted["options"].items() if stored["options"].get(name) != value
    ]
    changes = parts + options
    return f"{', '.join(changes)} changed" if changes else ""


def _description(folder: Path) -> dict[str, Any]:
    """Reads `store.json`: {"origin": ..., "files": [name, ...], "report": ...}."""
    return json.loads((folder / "store.json").read_text(encoding="utf-8"))


def _make(
    folder: Path,
    origin: _Origin,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    seen: SeenPairs,
) -> None:
    with atomic.new_folder(folder, replace=True, parents=True) as partial:
        report = _write_arrays(partial, corpus, tokenizers, config, seen)
        description = {
            "origin": origin,
            "files": sorted(path.name for path in partial.iterdir()),
            "report": dataclasses.asdict(report),
        }
        (partial / "store.json").write_text(
            json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        write_manifest(partial)


def _write_arrays(
    folder: Path,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    seen: SeenPairs,
) -> CorpusReport:
    has_inputs = config.model.has_inputs
    keeps_text = has_inputs and config.data.subword_sampling > 0
    pair_filter = PairFilter(config.data, corpus, has_inputs, seen)
    source_encoder, target_encoder = SideEncoder(tokenizers.source), SideEncoder(tokenizers.target)
    link_encoder = LinkEncoder(tokenizers, corpus.name) if corpus.is_aligned else None
    read = 0
    for chunk in _chunks(corpus):
        kept = [
            pair
            for number, pair in enumerate(chunk, start=read + 1)
            if pair_filter.keep(number, *pair)
        ]
        read += len(chunk)
        sources, targets = [source for source, _ in kept], [target for _, target in kept]
        _append_tokens(folder, "target", target_encoder.encode(targets), tokenizers.target)
        if has_inputs:
            _append_tokens(folder, "source", source_encoder.encode(sources), tokenizers.source)
        if keeps_text:
            texts = Texts.from_list(sources)
            _append_ragged(folder, "text.bytes", texts.data, texts.offsets)
        if link_encoder is not None:
            links = link_encoder.encode(cast(list[AlignedPair], kept))
            _append_ragged(folder, "links.pairs", links.tokens, links.offsets)
    if config.data.drop_duplicates:
        _append(folder / "seen.hashes", seen.hashes)

    dropped = pair_filter.dropped
    if sum(reason.count for reason in dropped.values()) == read:
        reasons = ", ".join(f"{pairs.count:,} {reason}" for reason, pairs in dropped.items())
        raise UserError(f"{corpus.name}: all of {read:,} pairs were dropped: {reasons}")
    if link_encoder is not None:
        link_encoder.finish()
    return CorpusReport(
        pairs=read,
        dropped=dropped,
        sources=source_encoder.report() if has_inputs else None,
        targets=target_encoder.report(),
    )


def _chunks(corpus: Corpus) -> Iterator[list[SentencePair]]:
    pairs = counted(corpus.pairs(), f"tokenizing {corpus.name}")
    while chunk := list(itertools.islice(pairs, _CHUNK)):
        yield chunk


def _token_type(tokenizer: Tokenizer) -> npt.DTypeLike:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


def _append_tokens(folder: Path, side: str, sentences: Sentences, tokenizer: Tokenizer) -> None:
    tokens = sentences.tokens.astype(_token_type(tokenizer))
    _append_ragged(folder, f"{side}.tokens", tokens, sentences.offsets)


def _append_ragged(folder: Path, name: str, values: np.ndarray, offsets: np.ndarray) -> None:
    """Appends [N] values to a file, and int64 offsets, which are from 0 to N, to that beside it."""
    values_path = folder / name
    offsets_path = values_path.with_suffix(".offsets")
    if not values_path.exists():
        _append(values_path, values[:0])
        _append(offsets_path, offsets[:1])
    _append(offsets_path, offsets[1:] + values_path.stat().st_size // values.itemsize)
    _append(values_path, values)


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())


def _read(folder: Path, corpus: Corpus, tokenizers: Tokenizers) -> EncodedCorpus:
    description = _description(folder)
    files = description["files"]
    sources: Sentences | None = None
    if "source.tokens" in files:
        source_tokens = _map(folder / "source.tokens", _token_type(tokenizers.source))
        sources = Sentences(source_tokens, _map(folder / "source.offsets", np.int64))
    target_tokens = _map(folder / "target.tokens", _token_type(tokenizers.target))
    texts: Texts | None = None
    if "text.bytes" in files:
        texts = Texts(
            _map(folder / "text.bytes", np.uint8), _map(folder / "text.offsets", np.int64)
        )
    links: Sentences | None = None
    if "links.pairs" in files:
        links = Sentences(
            _map(folder / "links.pairs", np.int32), _map(folder / "links.offsets", np.int64)
        )
    return EncodedCorpus(
        name=corpus.name,
        sources=sources,
        targets=Sentences(target_tokens, _map(folder / "target.offsets", np.int64)),
        report=CorpusReport.from_dict(description["report"]),
        texts=texts,
        weight=corpus.weight,
        links=links,
    )


def _map(path: Path, dtype: npt.DTypeLike) -> np.ndarray:
    # A plain array over the mapped file: numpy operations on `np.memmap` are slower.
    return np.asarray(np.memmap(path, dtype, mode="r"))
