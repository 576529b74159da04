"""Where sentence pairs come from: text files, TSV, TensorFlow Datasets, or a generator.

A split is a name. For files it is a file name without its ending, so `data.test_split` may be
`test_2017_flickr`; for TensorFlow Datasets it may be a slice such as `train[:10%]`; generated
corpora have the three splits that the configuration names.
"""

import dataclasses
import gzip
import hashlib
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError

HELD_OUT_PAIRS = 500
"""Pairs in the valid and in the test split of a generated corpus."""

LONGEST_DIGIT_STRING = 12
"""Digits in the longest source of the reverse corpus."""

_TFDS_READ = 10_000  # Examples at a time: three times as fast as one by one.

_Meaning = TypeVar("_Meaning")


@dataclasses.dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: `targets[i]` translates `sources[i]`."""

    sources: list[str]
    targets: list[str]
    name: str
    """What messages call it: where it was read from."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all pairs in their order."""
        digest = hashlib.sha256()
        for source, target in zip(self.sources, self.targets, strict=True):
            digest.update(f"{source}\t{target}\n".encode())
        return digest.hexdigest()


def load_corpus(config: DataConfig, split: str) -> ParallelCorpus:
    """Reads or generates one split of the corpus that `config` describes.

    Raises:
      UserError: the corpus is missing, damaged, empty, or its two sides do not match.
    """
    loaders = {
        "text": _load_text,
        "tsv": _load_tsv,
        "tfds": _load_tfds,
        "phrases": _generate_phrases,
        "reverse": _generate_reverse,
    }
    return loaders[config.corpus](config, split)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, which may be gzipped (`.gz`); see `decode_lines`.

    Raises:
      UserError: the file is missing, empty, no whole gzip file, or not UTF-8 (names the line).
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    lines = decode_lines(data, str(path))
    if not lines:
        raise UserError(f"{path} is empty")
    return lines


def read_parallel(source_path: Path, target_path: Path) -> tuple[list[str], list[str]]:
    """The lines of two files of which line i of one translates line i of the other.

    Raises:
      UserError: see `read_lines`; or they have different numbers of lines.
    """
    sources, targets = read_lines(source_path), read_lines(target_path)
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources)} lines but {target_path} has {len(targets)}: "
            "line i of one must translate line i of the other"
        )
    return sources, targets


def decode_lines(data: bytes, name: str) -> list[str]:
    r"""The lines of UTF-8 text; no text has no lines.

    Lines end with "\n" or "\r\n" and nowhere else: other separators that Unicode knows, such as
    U+2028, are part of a sentence. A byte order mark at the start is not.

    Raises:
      UserError: `name`, where the text was read from, is not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{name}, line {line}: not UTF-8; convert it to UTF-8") from error
    if not text:
        return []
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _find(folder: str, name: str) -> Path:
    """The file `name` or `name.gz` in the folder that data.path names."""
    if not folder:
        raise UserError(f"data.path is empty: name the folder that has {name} or {name}.gz")
    if not Path(folder).is_dir():
        raise UserError(f"data.path={folder} is not a folder")
    for path in (Path(folder, name), Path(folder, f"{name}.gz")):
        if path.exists():
            return path
    raise UserError(f"data.path={folder} has neither {name} nor {name}.gz")


def _load_text(config: DataConfig, split: str) -> ParallelCorpus:
    source_path = _find(config.path, f"{split}.{config.source_language}")
    target_path = _find(config.path, f"{split}.{config.target_language}")
    sources, targets = read_parallel(source_path, target_path)
    return ParallelCorpus(sources, targets, f"{source_path} and {target_path}")


def _load_tsv(config: DataConfig, split: str) -> ParallelCorpus:
    path = _find(config.path, f"{split}.tsv")
    pairs = [line.split("\t") for line in read_lines(path)]
    for number, columns in enumerate(pairs, start=1):
        if len(columns) != 2:
            raise UserError(
                f"{path}, line {number}: {len(columns) - 1} tabs; "
                "a line is a source, one tab, a target"
            )
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    return ParallelCorpus(sources, targets, str(path))


def _load_tfds(config: DataConfig, split: str) -> ParallelCorpus:
    examples = _open_tfds(config.path, split)
    languages = {"source": config.source_language, "target": config.target_language}
    features = list(examples.dataset_info.features)
    for side, language in languages.items():
        if language not in features:
            raise UserError(
                f"data.{side}_language={language}: data.path={config.path} has only "
                f"{', '.join(features)}"
            )
    pairs = [
        tuple(example[language].decode() for language in languages.values())
        for first in range(0, len(examples), _TFDS_READ)
        for example in examples.__getitems__(range(first, min(first + _TFDS_READ, len(examples))))
    ]
    sources, targets = (list(side) for side in zip(*pairs, strict=True))
    return ParallelCorpus(sources, targets, f"{config.path}/{split}")


def _open_tfds(path: str, split: str) -> Any:
    """The examples of a split, read without TensorFlow, which only preparation may need.

    Returns:
      A sequence of {feature: bytes}, with the attribute `dataset_info`.

    Raises:
      UserError: TensorFlow Datasets is not installed, or the split is not there to be read.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            "data.corpus=tfds needs tensorflow-datasets: pip install 'flaxformer_mt[data]'"
        ) from error
    if not path:
        raise UserError("data.path is empty: name a builder, such as wmt14_translate/de-en")
    # The builders of WMT and Flores are registered when their class is first touched.
    getattr(tfds.translate, path.partition("/")[0].title().replace("_", ""), None)
    try:
        folder_given = Path(path).is_dir()
        builder = tfds.builder_from_directory(path) if folder_given else tfds.builder(path)
        return builder.as_data_source(split)
    except (ImportError, NotImplementedError) as error:
        raise UserError(
            f"data.path={path} is not prepared as array_record; once, with tensorflow installed: "
            f"tensorflow_datasets.builder({path!r}, file_format='array_record')"
            ".download_and_prepare()"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.path={path}, split {split}: {reason}") from error


def _generate_phrases(config: DataConfig, split: str) -> ParallelCorpus:
    from flaxformer_mt.data import phrases

    source_language = phrases.Language(config.source_language, "data.source_language")
    target_language = phrases.Language(config.target_language, "data.target_language")
    return _generate(
        config,
        split,
        draw=phrases.draw,
        say_source=lambda meaning: meaning(source_language),
        say_target=lambda meaning: meaning(target_language),
    )


def _generate_reverse(config: DataConfig, split: str) -> ParallelCorpus:
    """Digits parted by spaces, so that no tokenizer joins two of them."""
    return _generate(
        config,
        split,
        draw=lambda rng: rng.choices("0123456789", k=rng.randint(1, LONGEST_DIGIT_STRING)),
        say_source=" ".join,
        say_target=lambda digits: " ".join(reversed(digits)),
    )


def _generate(
    config: DataConfig,
    split: str,
    draw: Callable[[random.Random], _Meaning],
    say_source: Callable[[_Meaning], str],
    say_target: Callable[[_Meaning], str],
) -> ParallelCorpus:
    """Draws pairs whose sources are distinct and belong to `split`.

    A checksum of the source says which split a pair belongs to (valid and test own a tenth of all
    sources each), so the splits are disjoint whatever their sizes and seeds.
    """
    splits = (config.valid_split, config.test_split, config.train_split)
    if split not in splits:
        raise UserError(
            f"data.corpus={config.corpus} has no split {split}, only {', '.join(splits)}"
        )
    wanted = config.generated_pairs if split == config.train_split else HELD_OUT_PAIRS
    rng = random.Random(f"{config.generator_seed} {split}")
    pairs: dict[str, str] = {}
    while len(pairs) < wanted:
        meaning = draw(rng)
        source = say_source(meaning)
        owner = splits[min(zlib.crc32(source.encode()) % 10, 2)]
        if owner == split and source not in pairs:
            pairs[source] = say_target(meaning)
    return ParallelCorpus(list(pairs), list(pairs.values()), f"generated {config.corpus}/{split}")
