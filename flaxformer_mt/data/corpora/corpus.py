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
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, cast

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora import alignments, arrow_reader, tables, text_files, tfds_reader
from flaxformer_mt.data.corpora.entities import unescaped
from flaxformer_mt.data.corpora.rows import COLUMN, Dropped, Reading, merged, with_location
from flaxformer_mt.data.corpora.text_files import Source, of_files
from flaxformer_mt.errors import UserError, requiring
from flaxformer_mt.remote.reading import local_list

_log = logging.getLogger(__name__)

HELD_OUT_PAIRS = 500
"""Number of pairs in the valid and test splits of a generated corpus."""

LONGEST_DIGIT_STRING = 12
"""Maximum number of digits in a source of the "reverse" corpus."""

SentencePair: TypeAlias = tuple[str, str]
Role: TypeAlias = Literal["train", "valid", "test"]

_WITH_COLUMNS = ("tsv", "csv", "jsonl", "parquet", "datasets", "tmx")
"""Kinds of corpora whose columns, or languages, can be chosen."""

_Draw: TypeAlias = Callable[[random.Random], tuple[str, Callable[[], str]]]
"""Draws a source, and a function that returns its translation."""


class Chunk(NamedTuple):
    """The pairs of some consecutive rows of a corpus."""

    pairs: list[SentencePair]
    numbers: list[int]
    """The number of the row of each pair, from 1."""
    malformed: dict[str, Dropped]


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
    """Counts the lines of the text that it is a part of: all "lines", those to "train" on, those
    held out for "valid" and "test", and those "left_out", since they share a side with one of them.
    None if none are held out."""
    may_be_empty: bool = False
    """Whether it was held out of a corpus that may be too small for it to have any pair."""
    fields: tuple[str, ...] = ()
    """What its pairs have beside their texts, see `Row.fields`."""
    malformed: Callable[[], dict[str, Dropped]] = dict
    """Returns the malformed rows that the last complete reading has dropped, by kind."""

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

    def untagged(self, pairs: Iterable[SentencePair] | None = None) -> Iterator[SentencePair]:
        """Yields pairs of the corpus, by default all, without its tag."""
        pairs = self.pairs() if pairs is None else pairs
        if not self.tag:
            return iter(pairs)
        tag = f"{self.tag} "
        return (with_location((pair[0].removeprefix(tag), pair[1]), pair) for pair in pairs)

    def chunks(
        self, size: int, is_wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[Chunk | None]:
        """Yields the pairs of every `size` rows.

        Args:
          size: number of rows in a chunk; the last one may have fewer.
          is_wanted: whether a chunk, counted from 0, is read; otherwise None is yielded for it,
            which costs next to nothing with text files.

        Raises:
          UserError: see `pairs`.
        """
        return _chunked(self.pairs(), Reading(), size, is_wanted)


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
    malformed: Callable[[], dict[str, Dropped]] = dataclasses.field(default=dict, compare=False)
    """See `Corpus`."""

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all pairs in order, in hexadecimal."""
        return _digest_pairs(self.pairs()).hex()

    def pairs(self) -> Iterator[SentencePair]:
        """See `Corpus.pairs`."""
        return zip(self.sources, self.targets, strict=True)

    def sample(self, wanted: int) -> list[int]:
        """Returns `wanted` random indices, of each part in proportion to its size.

        They are in ascending order, and depend on the sizes alone.
        """
        generator = random.Random(0)
        sizes = [size for _, size in self.parts] or [len(self)]
        ends = list(itertools.accumulate(sizes))
        wanted = min(wanted, len(self))
        # Rounding the ends, not the sizes, gives as many pairs as are wanted.
        rounded = [wanted * end // max(len(self), 1) for end in ends]
        chosen: list[int] = []
        for end, size, last, before in zip(ends, sizes, rounded, [0, *rounded], strict=False):
            chosen += sorted(generator.sample(range(end - size, end), last - before))
        return chosen


@dataclasses.dataclass(frozen=True)
class StreamedCorpus(Corpus):
    """Sentence pairs that are read anew on each iteration."""

    name: str
    languages: tuple[str, str]
    tag: str
    weight: float
    stream: Callable[[Reading], Iterator[SentencePair | None]]
    """Opens an iterator over the pairs, without tags; None for a row that is no pair."""
    digest: Callable[[], bytes]
    """Computes the SHA-256 of the underlying files or pairs."""
    division: Callable[[], dict[str, int]] | None = None
    may_be_empty: bool = False
    """See `Corpus`."""
    fields: tuple[str, ...] = ()
    """See `Corpus`."""
    malformed: Callable[[], dict[str, Dropped]] = dict
    """See `Corpus`."""
    drops_malformed: bool = False

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tag and the underlying files or pairs, in hexadecimal."""
        return hashlib.sha256(f"{self.tag}\n".encode() + self.digest()).hexdigest()

    def pairs(self) -> Iterator[SentencePair]:
        """See `Corpus.pairs`."""
        return filter(None, self._rows(Reading(self.drops_malformed, self.name)))

    def chunks(
        self, size: int, is_wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[Chunk | None]:
        """See `Corpus.chunks`."""
        is_wanted = functools.cache(is_wanted)

        def has_wanted(first: int, last: int) -> bool:
            return any(map(is_wanted, range(first // size, (last - 1) // size + 1)))

        reading = Reading(self.drops_malformed, self.name, has_wanted)
        return _chunked(self._rows(reading), reading, size, is_wanted)

    def _rows(self, reading: Reading) -> Iterator[SentencePair | None]:
        rows = self.stream(reading)
        if not self.tag:
            return rows
        return (row and with_location((f"{self.tag} {row[0]}", row[1]), row) for row in rows)


def open_corpora(config: DataConfig, role: Role, has_inputs: bool = True) -> list[StreamedCorpus]:
    """Opens all corpora of a role without reading their text, and without holding out any of it.

    They are the one that `config` describes in its own fields, or those of `train_corpora`,
    `valid_corpora` and `test_corpora`; none for a test split that is named "". A language model
    (`has_inputs` is False) only needs the target side.

    Raises:
      UserError: a file, a builder, a split or a language does not exist.
    """
    corpora = getattr(config, f"{role}_corpora")
    split = getattr(config, f"{role}_split")
    if not corpora and role == "test" and not split:
        return []
    opened = []
    for number, corpus in enumerate(corpora or (CorpusConfig(),)):
        prefix = f"data.{role}_corpora.{number}." if corpora else "data."
        completed = _completed(corpus, config, split)
        name, chosen = f"{prefix}split", corpus.split
        if not corpora and role == "train" and split != DataConfig.train_split:
            name, chosen = "data.train_split", split
        if chosen and _has_no_splits(completed):
            raise UserError(
                f"{name}={chosen} has no effect: {prefix}path={completed.path} has no splits"
            )
        if not corpora and role != "train" and _has_no_splits(completed):
            raise UserError(
                f"data.path={completed.path} has only training pairs: set others aside by "
                f"data.hold_out=1000, or give a folder, or data.{role}_corpora"
            )
        columns = config.columns_of_pairs if role == "train" else {}
        opened.append(open_corpus(completed, config, prefix, has_inputs, columns))
    if role == "train" and config.alignments:
        return [with_alignments(opened[0], Path(config.alignments), "data.alignments")]
    return opened


def open_path(
    data: DataConfig, split: str, prefix: str = "", tag: str = "", weight: float = 1.0
) -> StreamedCorpus:
    """Opens the corpus that the fields of `data` describe; see `open_corpus`."""
    corpus = _completed(CorpusConfig(tag=tag, weight=weight), data, split)
    return open_corpus(corpus, data, prefix, numbers=data.columns_of_pairs)


def open_corpus(
    corpus: CorpusConfig,
    data: DataConfig,
    prefix: str,
    has_inputs: bool = True,
    numbers: Mapping[str, str] = MappingProxyType({}),
) -> StreamedCorpus:
    """Opens one corpus, of which only the tag may be empty, without reading its text.

    `data` has the options of generated corpora, and messages name the fields of `corpus` after
    `prefix`: "data.", "--". `numbers` as of `tables.Table`.
    """
    if corpus.tag and not has_inputs:
        raise UserError(
            f"{prefix}tag={corpus.tag}: a language model has no sources to prepend a tag to"
        )
    if corpus.columns and corpus.kind not in _WITH_COLUMNS:
        text = f"{prefix}path={corpus.path}" if corpus.path else f"text of kind {corpus.kind}"
        raise UserError(
            f"{prefix}columns={corpus.columns}: {text} has no columns: leave it out, or give the "
            "file that has them"
        )
    if numbers and (corpus.kind == "tmx" or corpus.kind not in _WITH_COLUMNS):
        raise UserError(
            f"{prefix}pair_columns={data.pair_columns}: text of kind {corpus.kind} has no columns: "
            "leave it out, or give a table"
        )
    source = _open(corpus, data, prefix, has_inputs, numbers)
    last = Reading()
    told: set[str] = set()

    def stream(reading: Reading) -> Iterator[SentencePair | None]:
        nonlocal last
        rows = iter(source.rows(reading))
        if not has_inputs:
            rows = (row and with_location(("", row[-1]), row) for row in rows)
        if data.unescape_html:
            rows = (
                row and with_location((unescaped(row[0]), unescaped(row[1])), row) for row in rows
            )
        yield from cast(Iterator[SentencePair | None], rows)
        reading.check()
        last = reading
        unused = (f"{source.name}: {kind}: {rows}" for kind, rows in reading.left_out.items())
        for remark in (*unused, *reading.remarks):
            if remark not in told:
                told.add(remark)
                _log.warning("%s", remark)

    def digest() -> bytes:
        if source.digest is None:
            return _digest_pairs(opened.untagged())
        files = source.digest()
        return hashlib.sha256(b"unescaped" + files).digest() if data.unescape_html else files

    opened = StreamedCorpus(
        name=source.name,
        languages=_languages(corpus),
        tag=" ".join(corpus.tag.split()),
        weight=corpus.weight,
        stream=stream,
        digest=digest,
        malformed=lambda: last.dropped,
        drops_malformed=data.bad_rows == "drop",
        fields=tuple(COLUMN + name for name in numbers),
    )
    return opened


def with_alignments(corpus: StreamedCorpus, path: Path, option: str) -> StreamedCorpus:
    """Returns a corpus without a tag with the links of an alignment file, see `links_of`.

    Messages name `option`, which gave the file.
    """
    if not path.is_file():
        raise UserError(f"{option}={path} is not a file")
    if corpus.tag:
        raise UserError(f"{option}={path} counts the words of sources, which have no tag: omit it")
    return dataclasses.replace(
        corpus,
        stream=lambda reading: alignments.stream_aligned(corpus.stream(reading), corpus.name, path),
        digest=lambda: hashlib.sha256(corpus.digest() + text_files.digest_file(path)).digest(),
        fields=(*corpus.fields, alignments.FIELD),
    )


def read_corpus(corpora: Sequence[Corpus]) -> ParallelCorpus:
    """Reads all pairs of several corpora into memory, in the order of the corpora."""
    texts = [list(corpus.pairs()) for corpus in corpora]
    pairs = list(itertools.chain(*texts))
    return ParallelCorpus(
        sources=[source for source, _ in pairs],
        targets=[target for _, target in pairs],
        name=" + ".join(corpus.name for corpus in corpora),
        parts=tuple((corpus.name, len(own)) for corpus, own in zip(corpora, texts, strict=True)),
        # Those of held-out pairs are in the report of the training corpus.
        malformed=lambda: merged(each.malformed() for each in corpora if each.division is None),
    )


def load_corpus(config: DataConfig, split: str) -> ParallelCorpus:
    """Reads one split of the corpus that the fields of `config` describe into memory."""
    return read_corpus([open_path(config, split, "data.")])


def _completed(corpus: CorpusConfig, data: DataConfig, split: str) -> CorpusConfig:
    """Fills in the empty fields of a corpus from `data`, and its kind from what the path names."""
    path = corpus.path or data.path
    path = path if path.startswith("tfds:") else local_list(path)
    kind = "tfds" if path.startswith("tfds:") else corpus.kind or data.corpus
    if kind == "text" and Path(path).is_file():
        kind = tables.form_of(Path(path))
    elif kind == "text" and arrow_reader.is_saved(Path(path)):
        kind = "datasets"
    elif kind == "text" and tfds_reader.is_prepared(Path(path)):
        kind = "tfds"
    return dataclasses.replace(
        corpus,
        kind=kind,
        path=path.removeprefix("tfds:"),
        split=corpus.split or split,
        columns=corpus.columns or data.columns,
        source_language=corpus.source_language or data.source_language,
        target_language=corpus.target_language or data.target_language,
    )


def _has_no_splits(corpus: CorpusConfig) -> bool:
    """Returns whether the path of a completed corpus names files, and not a folder of splits."""
    path = Path(corpus.path)
    if corpus.kind == "text":
        return bool(corpus.path) and _parallel_files(corpus) is not None
    if corpus.kind == "datasets":
        return not (path / "dataset_dict.json").exists()
    return path.is_file()


def _languages(corpus: CorpusConfig) -> tuple[str, str]:
    return corpus.source_language, corpus.target_language


def _open(
    corpus: CorpusConfig,
    data: DataConfig,
    prefix: str,
    has_inputs: bool,
    numbers: Mapping[str, str],
) -> Source:
    path, split, languages = corpus.path, corpus.split, _languages(corpus)
    match corpus.kind:
        case "text":
            return _open_text(corpus, prefix, has_inputs)
        case ("tsv" | "csv" | "jsonl" | "parquet" | "tmx") as form:
            return _open_table(corpus, form, data, prefix, numbers)
        case "reverse":
            return _generate(corpus, data, _draw_digits)
        case "phrases":
            return _generate(corpus, data, _phrases(corpus, prefix))
        case "datasets":
            columns, option = corpus.columns, f"{prefix}path"
            return arrow_reader.open_saved(Path(path), split, columns, languages, option, numbers)
    known = languages if has_inputs else (None, languages[1])
    return tfds_reader.open_split(path, split, known, prefix)


def _open_text(corpus: CorpusConfig, prefix: str, has_inputs: bool) -> Source:
    pair = _parallel_files(corpus)
    if pair is not None:
        return of_files([pair if has_inputs else pair[1:]], text_files.stream_parallel)
    languages = _languages(corpus)[0 if has_inputs else 1 :]
    found = [_find(corpus, prefix, f".{language}") for language in languages]
    alone = sorted(found[0].keys() ^ found[-1].keys())
    if alone:
        raise UserError(
            f"{prefix}path={corpus.path} has {alone[0]} in only one of the "
            f"languages {' and '.join(languages)}"
        )
    groups = [tuple(files[name] for files in found) for name in found[0]]
    return of_files(groups, text_files.stream_parallel)


def _parallel_files(corpus: CorpusConfig) -> tuple[Path, ...] | None:
    """Returns the two files that the path names, if it does: "a.en,b.de", or "a" for a.en, a.de."""
    names = corpus.path.split(",")
    if len(names) == 2 and all(Path(name).is_file() for name in names):
        return Path(names[0]), Path(names[1])
    if Path(corpus.path).is_dir():  # It takes precedence over such files beside it.
        return None
    ends = text_files.COMPRESSED
    for end in ("", *ends, *map(str.upper, ends)):
        pair = tuple(Path(f"{corpus.path}.{language}{end}") for language in _languages(corpus))
        if all(path.is_file() for path in pair):
            return pair
    return None


def _open_table(
    corpus: CorpusConfig,
    form: tables.Form,
    data: DataConfig,
    prefix: str,
    numbers: Mapping[str, str],
) -> Source:
    columns, languages, path = corpus.columns, _languages(corpus), Path(corpus.path)
    paths = [path] if path.is_file() else [*_find(corpus, prefix, f".{form}").values()]
    table = tables.Table(form, columns, languages, data.quoting, numbers)
    source = of_files([(path,) for path in paths], table.stream)
    has_default_quoting = data.quoting == "auto"
    if form == "tsv" and not columns and has_default_quoting and not numbers:
        return source
    # The same file has other pairs in another form, or in other columns.
    quoting = "" if has_default_quoting else f" {data.quoting}"
    others = f" {dict(numbers)}" if numbers else ""
    rule = f"{form} {columns or languages}{quoting}{others}\n".encode()
    digest = functools.partial(text_files.digest_files, paths)
    return source._replace(digest=lambda: hashlib.sha256(rule + digest()).digest())


def _find(corpus: CorpusConfig, prefix: str, suffix: str) -> dict[str, Path]:
    folder, option = corpus.path, f"{prefix}path"
    if not folder:
        raise UserError(f"{option} is empty: name the folder that has {corpus.split}{suffix}")
    if not Path(folder).is_dir():
        raise UserError(f"{option}={folder} is not a folder, and there is no such file")
    return text_files.find_files(Path(folder), corpus.split, suffix, option)


def _chunked(
    rows: Iterator[SentencePair | None],
    reading: Reading,
    size: int,
    is_wanted: Callable[[int], bool],
) -> Iterator[Chunk | None]:
    for number in itertools.count():
        chunk = list(itertools.islice(rows, size))
        malformed = reading.take()
        # The last rows may be none of the pairs.
        if not chunk and not malformed:
            return
        if is_wanted(number):
            numbers = [n for n, row in enumerate(chunk, number * size + 1) if row is not None]
            yield Chunk([*filter(None, chunk)], numbers, malformed)
        else:
            yield None


def _digest_pairs(pairs: Iterable[SentencePair]) -> bytes:
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(f"{source}\t{target}\n".encode())
    return digest.digest()


def _phrases(corpus: CorpusConfig, prefix: str) -> _Draw:
    with requiring(f"{prefix}corpus=phrases", "'flaxformer_mt[demo]'"):
        from flaxformer_mt.data.corpora import generated_phrases

    source_language, target_language = (
        generated_phrases.Language(code, f"{prefix}{side}_language")
        for side, code in zip(("source", "target"), _languages(corpus), strict=True)
    )

    def draw(rng: random.Random) -> tuple[str, Callable[[], str]]:
        meaning = generated_phrases.draw_phrase(rng)
        return meaning(source_language), lambda: meaning(target_language)

    return draw


def _draw_digits(rng: random.Random) -> tuple[str, Callable[[], str]]:
    """Draws space-separated digits, so that no tokenizer merges two of them."""
    digits = rng.choices("0123456789", k=rng.randint(1, LONGEST_DIGIT_STRING))
    return " ".join(digits), lambda: " ".join(reversed(digits))


def _generate(corpus: CorpusConfig, data: DataConfig, draw: _Draw) -> Source:
    """Generates the pairs of a split, with distinct sources.

    A checksum of the source assigns each pair to a split (valid and test own a tenth of all sources
    each), so the splits are disjoint for all sizes and seeds.
    """
    kind, split = corpus.kind, corpus.split
    splits = (data.valid_split, data.test_split, data.train_split)
    if split not in splits:
        raise UserError(f"data.corpus={kind} has no split {split}, only {', '.join(splits)}")
    size = data.generated_pairs if split == data.train_split else HELD_OUT_PAIRS
    rng = random.Random(f"{data.generator_seed} {split}")
    pairs: dict[str, str] = {}
    while len(pairs) < size:
        source, translate = draw(rng)
        owner = splits[min(zlib.crc32(source.encode()) % 10, 2)]
        if owner == split and source not in pairs:
            pairs[source] = translate()
    return Source(f"generated {kind}/{split}", lambda reading: pairs.items(), None)
