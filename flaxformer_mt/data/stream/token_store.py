"""Training corpora as tokens on disk: filtered and tokenised once, mapped into memory ever after.

The store of a corpus is a folder of flat arrays, each a file without any header, and `store.json`,
which lists them:

    source.tokens, source.offsets   all sources end to end; where each starts and the last one ends
    target.tokens, target.offsets   likewise
    text.bytes, text.offsets        the text of the sources, where splits are drawn anew
                                    (data.subword_sampling)
    seen.hashes                     of all pairs so far, where duplicates are dropped

`store.json` also says what the store was made of, so that a change of text, tokenizer or options is
noticed and the store made again. A store is written under another name and renamed when it is
whole: one that was interrupted is not taken for finished.
"""

import dataclasses
import itertools
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.filters import PairFilter, SeenPairs
from flaxformer_mt.data.progress import counted
from flaxformer_mt.data.stream.encoded_corpus import (
    CorpusReport,
    EncodedCorpus,
    SideEncoder,
    Texts,
    check_special_ids,
)
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic

_LAYOUT = 1  # Stores of another layout are made again.
_CHUNK = 20_000  # Pairs that are text in memory at a time.
_FILTER_OPTIONS = (
    "max_length_ratio", "max_words", "drop_identical", "drop_duplicates", "drop_wrong_script",
)  # fmt: skip

_Origin: TypeAlias = dict[str, Any]
"""What a store was made of, as JSON: {"text": ..., "tokenizer": ..., "options": {name: value}}."""

_log = logging.getLogger(__name__)


def open_stores(
    cache_folder: Path,
    corpora: Sequence[Corpus],
    tokenizers: Tokenizers,
    config: ExperimentConfig,
) -> list[EncodedCorpus]:
    """The training corpora as tokens, from their stores, which are made where they are missing.

    Only one process at a time may work in a folder.

    Args:
      cache_folder: has, or gets, the stores `train-0`, `train-1`, ...; others are removed.
      corpora: as `open_corpora` gives them, in their order.
      tokenizers: the vocabularies.
      config: the experiment; says what is filtered.

    Raises:
      UserError: model and tokenizer disagree about special ids; a corpus cannot be read, or none
        of its pairs is left; the folder cannot be written.
    """
    check_special_ids(tokenizers, config)
    folders = [cache_folder / f"train-{number}" for number in range(len(corpora))]
    for leftover in set(cache_folder.glob("train-*")) - set(folders):
        shutil.rmtree(leftover)
    stores = []
    for number, (folder, corpus) in enumerate(zip(folders, corpora, strict=True)):
        origin = _origin(corpora[: number + 1], tokenizers, config)
        if not _is_usable(folder, origin, corpus.name):
            seen = SeenPairs()
            if number and config.data.drop_duplicates:
                seen = SeenPairs(_map(folders[number - 1] / "seen.hashes", np.uint64))
            _make(folder, origin, corpus, tokenizers, config, seen)
        stores.append(_read(folder, corpus, tokenizers))
    return stores


def _origin(corpora: Sequence[Corpus], tokenizers: Tokenizers, config: ExperimentConfig) -> _Origin:
    """What the store of the last of `corpora` depends on; row lengths are not among it."""
    # A pair may be a duplicate of one in an earlier corpus.
    relevant = corpora if config.data.drop_duplicates else corpora[-1:]
    return {
        "text": [corpus.fingerprint for corpus in relevant],
        "tokenizer": [tokenizers.source.fingerprint, tokenizers.target.fingerprint],
        "options": {
            **{f"data.{name}": getattr(config.data, name) for name in _FILTER_OPTIONS},
            "data.subword_sampling": config.data.subword_sampling > 0,
            "model.has_inputs": config.model.has_inputs,
            "languages": [list(corpus.languages) for corpus in relevant],
            "layout": _LAYOUT,
        },
    }


def _is_usable(folder: Path, origin: _Origin, name: str) -> bool:
    """Whether the store is there, whole and made of `origin`; if it must go, a log line says why.

    Args:
      folder: of the store.
      origin: what it has to be made of.
      name: of the corpus, for the log.
    """
    if not folder.exists():
        return False
    reason = _damage(folder) or _changes(_description(folder)["origin"], origin)
    if reason:
        _log.warning("%s is filtered and tokenised anew: in %s, %s", name, folder, reason)
    return not reason


def _damage(folder: Path) -> str:
    """What is wrong with the files of a store; "" if they are as long as they were written."""
    try:
        sizes = _description(folder)["bytes"]
    except (OSError, ValueError, KeyError):
        return "store.json is missing or damaged"
    for name, wanted in sizes.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != wanted:
            return f"{name} is damaged: it has {size:,} bytes instead of {wanted:,}"
    return ""


def _changes(stored: _Origin, wanted: _Origin) -> str:
    """In which parts and options two origins differ, in words; "" if in none."""
    parts = [f"the {part}" for part in ("text", "tokenizer") if stored[part] != wanted[part]]
    options = [
        name for name, value in wanted["options"].items() if stored["options"].get(name) != value
    ]
    changes = parts + options
    return f"{', '.join(changes)} changed" if changes else ""


def _description(folder: Path) -> dict[str, Any]:
    """`store.json`: {"origin": ..., "bytes": {file name: size}, "report": ...}."""
    return json.loads((folder / "store.json").read_text(encoding="utf-8"))


def _make(
    folder: Path,
    origin: _Origin,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    seen: SeenPairs,
) -> None:
    """Filters and tokenises `corpus` into a store that appears in `folder` when it is whole.

    Raises:
      UserError: the corpus cannot be read, or none of its pairs is left; the folder cannot be
        written.
    """
    with atomic.new_folder(folder, replace=True, parents=True) as partial:
        report = _write_arrays(partial, corpus, tokenizers, config, seen)
        description = {
            "origin": origin,
            "bytes": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
            "report": dataclasses.asdict(report),
        }
        (partial / "store.json").write_text(
            json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _write_arrays(
    folder: Path,
    corpus: Corpus,
    tokenizers: Tokenizers,
    config: ExperimentConfig,
    seen: SeenPairs,
) -> CorpusReport:
    """Writes the arrays of a store, a part of the corpus at a time."""
    has_inputs = config.model.has_inputs
    keeps_text = has_inputs and config.data.subword_sampling > 0
    pair_filter = PairFilter(config.data, corpus, has_inputs, seen)
    source_encoder, target_encoder = SideEncoder(tokenizers.source), SideEncoder(tokenizers.target)
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
    if config.data.drop_duplicates:
        _append(folder / "seen.hashes", seen.hashes)

    dropped = pair_filter.dropped
    if sum(reason.count for reason in dropped.values()) == read:
        reasons = ", ".join(f"{pairs.count:,} {reason}" for reason, pairs in dropped.items())
        raise UserError(f"{corpus.name}: none of {read:,} pairs is left: {reasons}")
    return CorpusReport(
        pairs=read,
        dropped=dropped,
        sources=source_encoder.report() if has_inputs else None,
        targets=target_encoder.report(),
    )


def _chunks(corpus: Corpus) -> Iterator[list[SentencePair]]:
    """The pairs of a corpus, `_CHUNK` at a time; on a terminal, a line counts them."""
    pairs = counted(corpus.pairs(), f"tokenising {corpus.name}")
    while chunk := list(itertools.islice(pairs, _CHUNK)):
        yield chunk


def _token_type(tokenizer: Tokenizer) -> npt.DTypeLike:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


def _append_tokens(folder: Path, side: str, sentences: Sentences, tokenizer: Tokenizer) -> None:
    tokens = sentences.tokens.astype(_token_type(tokenizer))
    _append_ragged(folder, f"{side}.tokens", tokens, sentences.offsets)


def _append_ragged(folder: Path, name: str, values: np.ndarray, offsets: np.ndarray) -> None:
    """Adds to two files: values end to end, and where each sequence starts and the last one ends.

    Args:
      folder: of both.
      name: of the file of values.
      values: [N].
      offsets: int64 [sequences + 1], from 0 to N.
    """
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
    """Maps a usable store into memory."""
    files = _description(folder)["bytes"]
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
    return EncodedCorpus(
        name=corpus.name,
        sources=sources,
        targets=Sentences(target_tokens, _map(folder / "target.offsets", np.int64)),
        report=CorpusReport.from_dict(_description(folder)["report"]),
        texts=texts,
        weight=corpus.weight,
    )


def _map(path: Path, dtype: npt.DTypeLike) -> np.ndarray:
    # A plain array over the mapped file: numpy is slower with its own subclass.
    return np.asarray(np.memmap(path, dtype, mode="r"))
