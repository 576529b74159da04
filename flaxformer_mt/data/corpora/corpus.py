"""Parallel corpora from text files, tables, prepared data sets and generators.

A `StreamedCorpus` reads its pairs anew each time, so text of any size needs no memory. A
`ParallelCorpus` holds its pairs in memory: development and test sets.

A split is selected by name. For files of a folder it is a file name without its suffix, so
`data.test_split` may be `test_2017_flickr`, or comma-separated names and glob patterns; for
TensorFlow Datasets it may be a slice such as `train[:10%]`; generated corpora have exactly the
three splits that the configuration names. A path may also name the files of a corpus, which then
has no splits.
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
from flaxformer_mt.data.corpora import datasets_reader, tables, text_files, tfds_reader
from flaxformer_mt.data.corpora.alignments import stream_aligned
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
    division: Callable[[], dict[str, int]] | None = None
    """Describes how held-out pairs were chosen, for `data.json`; None if none are held out."""
    may_be_empty: bool = False
    """Whether it was held out of a corpus that may be too small for it to have any pair."""
    is_aligned: bool = False
    """Whether its pairs are of the type `AlignedPair`."""

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

    def first_of_parts(self, wanted: int) -> list[int]:
        """Returns the indices of the first pairs of each part, in proportion to the parts' sizes.

        Args:
          wanted: the number of pairs; all, if there are fewer.
        """
        sizes = [size for _, size in self.parts] or [len(self)]
        ends = list(itertools.accumulate(sizes))
        wanted = min(wanted, len(self))
        # Rounding the ends, not the sizes, gives as many pairs as are wanted.
        rounded = [wanted * end // max(len(self), 1) for end in ends]
        return [
            end - size + index
            for end, size, last, before in zip(ends, sizes, rounded, [0, *rounded], strict=False)
            for index in range(last - before)
        ]


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
    division: Callable[[], dict[str, int]] | None = None
    """See `Corpus`."""
    may_be_empty: bool = False
    """See `Corpus`."""
    is_aligned: bool = False
    """See `Corpus`."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tag and the underlying files or pairs, in hexadecimal."""
        return hashlib.sha256(f"{self.tag}\n".encode() + self.digest()).hexdigest()

    def pairs(self) -> Iterator[SentencePair]:
        """See `Corpus.pairs`."""
        if not self.tag:
            return self.stream()
        return ((f"{self.tag} {source}", target) for source, target in self.stream())


def open_corpora(config: DataConfig, role: Role, has_inputs: bool = True) -> list[StreamedCorpus]:
    """Opens all corpora of a role without reading their text, and without holding out any of it.

    Args:
      config: describes one corpus in its own fields, or several in `train_corpora`,
        `valid_corpora` and `test_corpora`.
      role: which corpora to open.
      has_inputs: False for a language model, which only needs the target side.

    Returns:
      The corpora; none for a test split that is named "".

    Raises:
      UserError: a file, a builder, a split or a language does not exist.
    """
    corpora = getattr(config, f"{role}_corpora")
    split = getattr(config, f"{role}_split")
    if not corpora:
        if role == "test" and not split:
            return []
        corpus = _completed(CorpusConfig(), config, split)
        if role != "train" and _has_no_splits(corpus):
            raise UserError(
                f"data.path={config.path} has only training pairs: set others aside by "
                f"--data.hold-out 1000, or give a folder, or data.{role}_corpora"
            )
        opened = open_corpus(corpus, config, "data.", has_inputs)
        if role == "train" and config.alignments:
            opened = with_alignments(opened, Path(config.alignments), "data.alignments")
        return [opened]
    several = []
    for number, corpus in enumerate(corpora):
        prefix, completed = f"data.{role}_corpora.{number}.", _completed(corpus, config, split)
        if corpus.split and _has_no_splits(completed):
            raise UserError(
                f"{prefix}split={corpus.split} has no effect: {prefix}path={completed.path} has no "
                "splits"
            )
        several.append(open_corpus(completed, config, prefix, has_inputs))
    return several


def open_path(
    data: DataConfig, split: str, prefix: str = "", tag: str = "", weight: float = 1.0
) -> StreamedCorpus:
    """Opens the corpus that the fields of `data` describe; arguments as of `open_corpus`."""
    corpus = _completed(CorpusConfig(tag=tag, weight=weight), data, split)
    return open_corpus(corpus, data, prefix)


def open_corpus(
    corpus: CorpusConfig, data: DataConfig, prefix: str, has_inputs: bool = True
) -> StreamedCorpus:
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
        "tsv": functools.partial(_open_table, "tsv"),
        "csv": functools.partial(_open_table, "csv"),
        "jsonl": functools.partial(_open_table, "jsonl"),
        "datasets": _open_saved,
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


def with_alignments(corpus: StreamedCorpus, path: Path, option: str) -> StreamedCorpus:
    """Returns a corpus whose pairs have the links of an alignment file.

    Args:
      corpus: the corpus, without a tag.
      path: a file with one line of links per pair, see `AlignedPair`.
      option: name of the option that gave the file, for messages.

    Raises:
      UserError: there is no such file, or the corpus has a tag.
    """
    if not path.is_file():
        raise UserError(f"{option}={path} is not a file")
    if corpus.tag:
        raise UserError(f"{option}={path} counts the words of sources, which have no tag: omit it")
    return dataclasses.replace(
        corpus,
        stream=lambda: stream_aligned(corpus.stream(), corpus.name, path),
        digest=lambda: hashlib.sha256(corpus.digest() + text_files.digest_file(path)).digest(),
        is_aligned=True,
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
    return read_corpus([open_path(config, split, "data.")])


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
    """Fills in the empty fields of a corpus from `data`, and its kind from what the path names."""
    path = corpus.path or data.path
    kind = "tfds" if path.startswith("tfds:") else corpus.kind or data.corpus
    if kind == "text" and Path(path).is_file():
        kind = tables.form_of(Path(path))
    elif kind == "text" and datasets_reader.is_saved(Path(path)):
        kind = "datasets"
    return dataclasses.replace(
        corpus,
        kind=kind,
        path=path.removeprefix("tfds:"),
        split=corpus.split or split,
        columns=corpus.columns or data.columns,
        source_language=corpus.source_language or data.source_language,
        target_language=corpus.target_language or data.target_language,
    )


def has_splits(data: DataConfig) -> bool:
    """Returns whether `data.train_split` chooses anything: `data.path` may name a corpus' files."""
    return not _has_no_splits(_completed(CorpusConfig(), data, data.train_split))


def _has_no_splits(corpus: CorpusConfig) -> bool:
    """Returns whether the path of a completed corpus names files, and not a folder of splits."""
    path = Path(corpus.path)
    if corpus.kind == "text":
        return bool(corpus.path) and _parallel_files(corpus) is not None
    if corpus.kind == "datasets":
        return not (path / "dataset_dict.json").exists()
    return path.is_file()


def _open_text(request: _Request) -> _Text:
    source_language, target_language = request.languages
    _reject_columns(request)
    pair = _parallel_files(request.corpus)
    if pair is not None:
        files = [pair if request.has_inputs else pair[1:]]
    elif not request.has_inputs:
        files = [(path,) for path in _find(request, f".{target_language}").values()]
    else:
        sources = _find(request, f".{source_language}")
        targets = _find(request, f".{target_language}")
        alone = sorted(sources.keys() ^ targets.keys())
        if alone:
            raise UserError(
                f"{request.prefix}path={request.corpus.path} has {alone[0]} in only one of the "
                f"languages {source_language} and {target_language}"
            )
        files = [(path, targets[name]) for name, path in sources.items()]
    return _files(files, text_files.stream_parallel if request.has_inputs else _stream_targets)


def _parallel_files(corpus: CorpusConfig) -> tuple[Path, ...] | None:
    """Returns the two files that the path names, if it does: "a.en,b.de", or "a" for a.en, a.de.

    A folder "a" takes precedence over such files beside it.
    """
    names = corpus.path.split(",")
    if len(names) == 2 and all(Path(name).is_file() for name in names):
        return Path(names[0]), Path(names[1])
    languages = corpus.source_language, corpus.target_language
    if Path(corpus.path).is_dir():
        return None
    for end in ("", *text_files.COMPRESSED):
        pair = tuple(Path(f"{corpus.path}.{language}{end}") for language in languages)
        if all(path.is_file() for path in pair):
            return pair
    return None


def _open_table(form: tables.Form, request: _Request) -> _Text:
    columns, languages = request.corpus.columns, request.languages
    path = Path(request.corpus.path)
    paths = [path] if path.is_file() else [*_find(request, f".{form}").values()]

    def stream(path: Path) -> Iterator[SentencePair]:
        pairs = tables.stream_table(path, form, columns, languages)
        return pairs if request.has_inputs else (("", target) for _, target in pairs)

    opened = _files([(path,) for path in paths], stream)
    if form == "tsv" and not columns:
        return opened
    # The same file has other pairs in another form, or in other columns.
    rule = f"{form} {columns or languages}\n".encode()
    return dataclasses.replace(
        opened, digest=lambda: hashlib.sha256(rule + opened.digest()).digest()
    )


def _open_saved(request: _Request) -> _Text:
    path, option = request.corpus.path, f"{request.prefix}path"
    if not datasets_reader.is_saved(Path(path)):
        raise UserError(f"{option}={path} is not a folder that datasets' save_to_disk has written")
    opened = datasets_reader.open_saved(
        Path(path), request.corpus.split, request.corpus.columns, request.languages, option
    )

    def stream() -> Iterator[SentencePair]:
        pairs = opened.pairs()
        return pairs if request.has_inputs else (("", target) for _, target in pairs)

    return _Text(opened.name, stream, opened.digest)


def _reject_columns(request: _Request) -> None:
    corpus, prefix = request.corpus, request.prefix
    if corpus.columns:
        text = f"{prefix}path={corpus.path}" if corpus.path else f"text of kind {corpus.kind}"
        raise UserError(
            f"{prefix}columns={corpus.columns}: {text} has no columns: leave it out, or give the "
            "file that has them"
        )


def _open_tfds(request: _Request) -> _Text:
    _reject_columns(request)
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
        raise UserError(f"{option}={folder} is not a folder, and there is no such file")
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


def _digest_files(paths: Iterable[Path]) -> bytes:
    return hashlib.sha256(b"".join(map(text_files.digest_file, paths))).digest()


def _digest_pairs(pairs: Iterable[SentencePair]) -> bytes:
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(f"{source}\t{target}\n".encode())
    return digest.digest()


def _generate_phrases(request: _Request) -> _Text:
    try:
        from flaxformer_mt.data.corpora import generated_phrases
    except ImportError as error:
        raise UserError(
            f"{request.prefix}corpus=phrases needs packages that are not installed: "
            "pip install 'flaxformer_mt[demo]'"
        ) from error

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
    _reject_columns(request)
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
