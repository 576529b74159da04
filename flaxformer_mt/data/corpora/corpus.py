"""Parallel corpora from text files, TSV files, TensorFlow Datasets and generators.

A `StreamedCorpus` reads its pairs anew each time, so text of any size needs no memory. A
`ParallelCorpus` holds its pairs in memory: development and test sets.

A split is selected by name. For files it is a file name without its suffix, so `data.test_split`
may be `test_2017_flickr`, or comma-separated names and glob patterns; for TensorFlow Datasets it
may be a slice such as `train[:10%]`; generated corpora have exactly the three splits that the
configuration names.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora import text_files, tfds_reader
from flaxformer_mt.errors import UserError

HELD_OUT_PAIRS = 500
"""Number of pairs in the valid and test splits of a generated corpus."""

LONGEST_DIGIT_STRING = 12
"""Maximum number of digits in a source of the "reverse" corpus."""

SentencePair: TypeAlias = tuple[str, str]
"""Source and target sentence."""
Role: TypeAlias = Literal["train", "valid", "test"]
"""The use of a corpus in a run."""

_Meaning = TypeVar("_Meaning")


class Corpus(abc.ABC):
    """Sentence pairs in a fixed order."""

    name: str
    """Origin of the text, for messages."""
    languages: tuple[str, str]
    """Codes of the source and target language; "" = unknown."""
    tag: str
    """Token prepended to every source, followed by a space; "" = none."""
    weight: float
    """Sampling weight of its pairs relative to those of other corpora."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the content, in hexadecimal; independent of file names."""

    @abc.abstractmethod
    def pairs(self) -> Iterator[SentencePair]:
        """Yields the pairs; sources include the tag, and are "" for a language model.

        Raises:
          UserError: the text is damaged, empty, or its two sides do not match.
        """


@dataclasses.dataclass(frozen=True)
class ParallelCorpus(Corpus):
    """Sentence pairs in memory: `targets[i]` translates `sources[i]`."""

    sources: list[str]
    """Source sentences, including tags."""
    targets: list[str]
    name: str
    languages: tuple[str, str] = ("", "")
    tag: str = ""
    weight: float = 1.0
    parts: tuple[tuple[str, int], ...] = ()
    """Name and number of pairs of each of the corpora that were read into it; () = only itself."""

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all pairs in order, in hexadecimal."""
        return _digest_pairs(self.pairs()).hex()

    def pairs(self) -> Iterator[SentencePair]:
        """See `Corpus.pairs`."""
        return zip(self.sources, self.targets, strict=True)


@dataclasses.dataclass(frozen=True)
class StreamedCorpus(Corpus):
    """Sentence pairs that are read anew on each iteration."""

    name: str
    languages: tuple[str, str]
    tag: str
    weight: float
    stream: Callable[[], Iterator[SentencePair]]
    """Opens an iterator over the pairs, without tags."""
    digest: Callable[[], bytes]
    """Computes the SHA-256 of the underlying files or pairs."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tag and the underlying files or pairs, in hexadecimal."""
        return hashlib.sha256(f"{self.tag}\n".encode() + self.digest()).hexdigest()

    def pairs(self) -> Iterator[SentencePair]:
        """See `Corpus.pairs`."""
        if not self.tag:
            return self.stream()
        return ((f"{self.tag} {source}", target) for source, target in self.stream())


def open_corpora(config: DataConfig, role: Role, has_inputs: bool = True) -> list[Corpus]:
    """Opens all corpora of a role without reading their text.

    Args:
      config: describes one corpus in its own fields, or several in `train_corpora`,
        `valid_corpora` and `test_corpora`.
      role: which corpora to open.
      has_inputs: False for a language model, which only needs the target side.

    Raises:
      UserError: a file, a builder, a split or a language does not exist.
    """
    corpora = getattr(config, f"{role}_corpora")
    split = getattr(config, f"{role}_split")
    if not corpora:
        return [open_corpus(_completed(CorpusConfig(), config, split), config, "data.", has_inputs)]
    return [
        open_corpus(
            _completed(corpus, config, split), config, f"data.{role}_corpora.{number}.", has_inputs
        )
        for number, corpus in enumerate(corpora)
    ]


def open_corpus(
    corpus: CorpusConfig, data: DataConfig, prefix: str, has_inputs: bool = True
) -> Corpus:
    """Opens one corpus without reading its text.

    Args:
      corpus: description of the corpus; only the tag may be empty.
      data: further options of generated corpora.
      prefix: prefix of the fields of `corpus` in messages: "data.", "--".
      has_inputs: False for a language model, which only needs the target side.

    Raises:
      UserError: a file, a builder, a split or a language does not exist.
    """
    openers: dict[str, Callable[[_Request], _Text]] = {
        "text": _open_text,
        "tsv": _open_tsv,
        "tfds": _open_tfds,
        "phrases": _generate_phrases,
        "reverse": _generate_reverse,
    }
    if corpus.tag and not has_inputs:
        raise UserError(
            f"{prefix}tag={corpus.tag}: a language model has no sources to prepend a tag to"
        )
    opened = openers[corpus.kind](_Request(corpus, data, prefix, has_inputs))
    return StreamedCorpus(
        name=opened.name,
        languages=(corpus.source_language, corpus.target_language),
        tag=" ".join(corpus.tag.split()),
        weight=corpus.weight,
        stream=opened.stream,
        digest=opened.digest,
    )


def read_corpus(corpora: Sequence[Corpus]) -> ParallelCorpus:
    """Reads all pairs of several corpora into memory, in the order of the corpora.

    Raises:
      UserError: see `Corpus.pairs`.
    """
    texts = [list(corpus.pairs()) for corpus in corpora]
    pairs = list(itertools.chain(*texts))
    return ParallelCorpus(
        sources=[source for source, _ in pairs],
        targets=[target for _, target in pairs],
        name=" + ".join(corpus.name for corpus in corpora),
        parts=tuple((corpus.name, len(own)) for corpus, own in zip(corpora, texts, strict=True)),
    )


def load_corpus(config: DataConfig, split: str) -> ParallelCorpus:
    """Reads one split of the corpus that the fields of `config` describe into memory.

    Raises:
      UserError: see `open_corpora` and `Corpus.pairs`.
    """
    return read_corpus([open_corpus(_completed(CorpusConfig(), config, split), config, "data.")])


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of `open_corpus`."""

    corpus: CorpusConfig
    data: DataConfig
    prefix: str
    has_inputs: bool

    @property
    def languages(self) -> tuple[str, str]:
        return self.corpus.source_language, self.corpus.target_language


@dataclasses.dataclass(frozen=True)
class _Text:
    """The result of opening a corpus; see the fields of `StreamedCorpus`."""

    name: str
    stream: Callable[[], Iterator[SentencePair]]
    digest: Callable[[], bytes]


def _completed(corpus: CorpusConfig, data: DataConfig, split: str) -> CorpusConfig:
    """Fills in the empty fields of a corpus from `data`; "tfds:" in a path selects that kind."""
    path = corpus.path or data.path
    return dataclasses.replace(
        corpus,
        kind="tfds" if path.startswith("tfds:") else corpus.kind or data.corpus,
        path=path.removeprefix("tfds:"),
        split=corpus.split or split,
        source_language=corpus.source_language or data.source_language,
        target_language=corpus.target_language or data.target_language,
    )


def _open_text(request: _Request) -> _Text:
    source_language, target_language = request.languages
    if not request.has_inputs:
        targets = _find(request, f".{target_language}")
        return _files([(path,) for path in targets.values()], _stream_targets)
    sources = _find(request, f".{source_language}")
    targets = _find(request, f".{target_language}")
    alone = sorted(sources.keys() ^ targets.keys())
    if alone:
        raise UserError(
            f"{request.prefix}path={request.corpus.path} has {alone[0]} in only one of the "
            f"languages {source_language} and {target_language}"
        )
    return _files(
        [(path, targets[name]) for name, path in sources.items()], text_files.stream_parallel
    )


def _open_tsv(request: _Request) -> _Text:
    stream = text_files.stream_tsv if request.has_inputs else _stream_tsv_targets
    return _files([(path,) for path in _find(request, ".tsv").values()], stream)


def _open_tfds(request: _Request) -> _Text:
    source, target = request.languages
    languages = (source if request.has_inputs else None, target)
    split = tfds_reader.open_split(
        request.corpus.path, request.corpus.split, languages, request.prefix
    )
    return _Text(split.name, split.pairs, split.digest)


def _find(request: _Request, suffix: str) -> dict[str, Path]:
    """Finds the files of a split; see `text_files.find_files`."""
    folder, option = request.corpus.path, f"{request.prefix}path"
    if not folder:
        raise UserError(
            f"{option} is empty: name the folder that has {request.corpus.split}{suffix}"
        )
    if not Path(folder).is_dir():
        raise UserError(f"{option}={folder} is not a folder")
    return text_files.find_files(Path(folder), request.corpus.split, suffix, option)


def _files(files: Sequence[tuple[Path, ...]], read: Callable[..., Iterator[SentencePair]]) -> _Text:
    """Concatenates files, or groups of parallel files, each of which `read` reads."""
    names = [" and ".join(map(str, group)) for group in files]
    more = f", and {len(files) - 1} more" if len(files) > 1 else ""
    return _Text(
        name=f"{names[0]}{more}",
        stream=lambda: itertools.chain.from_iterable(itertools.starmap(read, files)),
        digest=lambda: _digest_files(itertools.chain.from_iterable(files)),
    )


def _stream_targets(path: Path) -> Iterator[SentencePair]:
    return (("", target) for target in text_files.stream_lines(path))


def _stream_tsv_targets(path: Path) -> Iterator[SentencePair]:
    return (("", target) for _, target in text_files.stream_tsv(path))


def _digest_files(paths: Iterable[Path]) -> bytes:
    return hashlib.sha256(b"".join(map(text_files.digest_file, paths))).digest()


def _digest_pairs(pairs: Iterable[SentencePair]) -> bytes:
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(f"{source}\t{target}\n".encode())
    return digest.digest()


def _generate_phrases(request: _Request) -> _Text:
    from flaxformer_mt.data.corpora import generated_phrases

    source_language, target_language = (
        generated_phrases.Language(code, f"{request.prefix}{side}_language")
        for side, code in zip(("source", "target"), request.languages, strict=True)
    )
    return _generate(
        request,
        draw=generated_phrases.draw_phrase,
        to_source=lambda meaning: meaning(source_language),
        to_target=lambda meaning: meaning(target_language),
    )


def _generate_reverse(request: _Request) -> _Text:
    """Generates space-separated digits, so that no tokenizer merges two of them."""
    return _generate(
        request,
        draw=lambda rng: rng.choices("0123456789", k=rng.randint(1, LONGEST_DIGIT_STRING)),
        to_source=" ".join,
        to_target=lambda digits: " ".join(reversed(digits)),
    )


def _generate(
    request: _Request,
    draw: Callable[[random.Random], _Meaning],
    to_source: Callable[[_Meaning], str],
    to_target: Callable[[_Meaning], str],
) -> _Text:
    """Generates the pairs of a split, with distinct sources.

    A checksum of the source assigns each pair to a split (valid and test own a tenth of all sources
    each), so the splits are disjoint whatever their sizes and seeds.
    """
    data, kind, split = request.data, request.corpus.kind, request.corpus.split
    splits = (data.valid_split, data.test_split, data.train_split)
    if split not in splits:
        raise UserError(f"data.corpus={kind} has no split {split}, only {', '.join(splits)}")
    size = data.generated_pairs if split == data.train_split else HELD_OUT_PAIRS
    rng = random.Random(f"{data.generator_seed} {split}")
    pairs: dict[str, str] = {}
    while len(pairs) < size:
        meaning = draw(rng)
        source = to_source(meaning)
        owner = splits[min(zlib.crc32(source.encode()) % 10, 2)]
        if owner == split and source not in pairs:
            pairs[source] = to_target(meaning)

    def stream() -> Iterator[SentencePair]:
        return ((source if request.has_inputs else "", pairs[source]) for source in pairs)

    return _Text(f"generated {kind}/{split}", stream, lambda: _digest_pairs(stream()))
