"""Reads TensorFlow Datasets data sets in array_record format, without TensorFlow.

Supported are all data sets with a feature `Translation` (WMT, TED talks, OPUS, ParaCrawl, and those
built by `flaxformer-mt prepare`) or `TranslationVariableLanguages` (multilingual TED talks), as
their only feature or as one of several.
"""

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flaxformer_mt.data.corpora.language_codes import chosen
from flaxformer_mt.data.corpora.rows import Fault, Reading, decoded, located, one_line
from flaxformer_mt.data.corpora.text_files import Source, digest_file
from flaxformer_mt.errors import UserError, first_line, requiring
from flaxformer_mt.input_files import read_json, require_regular_files

_READ_AT_ONCE = 10_000  # Records; three times as fast as reading them one by one.

LanguagePair: TypeAlias = tuple[str | None, str]
"""Codes of source and target language; the source is None for a language model."""
_Take: TypeAlias = Callable[[Any], tuple[bytes, bytes] | None]
"""Extracts the pair from an example; None if the example lacks one of the languages."""


def is_prepared(path: Path) -> bool:
    """Returns whether a folder holds a data set, such as one of `flaxformer-mt prepare`."""
    return all((path / name).is_file() for name in ("dataset_info.json", "features.json"))


def require_tfds() -> Any:
    """Imports `tensorflow_datasets`."""
    with requiring("a data set of TensorFlow Datasets", "'flaxformer_mt[data]'"):
        import tensorflow_datasets

        # TensorFlow Datasets itself imports it only when a file is opened.
        importlib.import_module("array_record.python")
    return tensorflow_datasets


def _pairs(
    records: Any, take: _Take, name: str, reading: Reading
) -> Iterator[tuple[str, str] | None]:
    """Yields the pairs of a sequence of serialized examples; line breaks become spaces."""
    deserialize = records.dataset_info.features.deserialize_example_np
    for first in range(0, len(records), _READ_AT_ONCE):
        numbers = range(first, min(first + _READ_AT_ONCE, len(records)))
        for number, example in zip(numbers, _read(records, numbers, name), strict=True):
            try:
                texts = [one_line(decoded(text)) for text in take(deserialize(example)) or ()]
            except Exception as error:  # Another example than the features describe.
                raise UserError(
                    f"{name}, example {number + 1:,}: not as in features.json ({error!r})"
                ) from error
            fault = next((text for text in texts if isinstance(text, Fault)), None)
            if fault:
                reading.add(None, number + 1, fault)
                yield None
            elif texts:
                yield located(map(str, texts), None, number + 1)
            else:
                reading.leave_out(None, number + 1, Fault("examples without the languages"))


def _read(records: Any, numbers: range, name: str) -> Sequence[bytes]:
    try:
        read: Sequence[bytes] = records.__getitems__(numbers)
    except RuntimeError as error:
        raise UserError(f"{name} cannot be read ({error}): prepare or copy it again") from error
    # A truncated file may return empty records instead of raising an error.
    if not all(read):
        raise UserError(f"{name} has a truncated file: prepare or copy it again")
    return read


def _digest(records: Any, languages: LanguagePair) -> bytes:
    digest = hashlib.sha256(repr(languages).encode())
    for part in records.dataset_info.splits[records.split].file_instructions:
        digest.update(f"\t{part.skip} {part.take}\t".encode())
        digest.update(digest_file(Path(part.filename)))
    return digest.digest()


def open_split(path: str, split: str, languages: LanguagePair, prefix: str) -> Source:
    """Opens a split, such as "train[:10%]", of a data set.

    `path` is the name of a builder ("wmt14_translate/de-en"), or a folder with `dataset_info.json`.
    Messages name the options after `prefix`: "data.".
    """
    if not path:
        raise UserError(f"{prefix}path is empty: name a builder, such as wmt14_translate/de-en")
    is_folder = Path(path).is_dir()
    if not is_folder and ":" in path.partition("/")[0]:
        raise UserError(
            f"{prefix}path={path}: only builders of TensorFlow Datasets itself are read; save "
            "one of Hugging Face by save_to_disk, and name its folder with data.corpus=datasets"
        )
    tfds = require_tfds()
    if is_folder:
        require_regular_files(path)
    # The builders of WMT and Flores are registered when their class is first accessed.
    getattr(tfds.translate, path.partition("/")[0].title().replace("_", ""), None)
    if is_folder and (features := Path(path, "features.json")).is_file():
        _check_classes(tfds, features)
    try:
        builder = tfds.builder_from_directory(path) if is_folder else tfds.builder(path)
        records = builder.as_data_source(
            split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
        )
        len(records)  # Raises ValueError for "train[9:3]".
        files = builder.info.splits[split].file_instructions
    except (ImportError, NotImplementedError) as error:
        raise UserError(_how_to_prepare(path, is_folder, prefix)) from error
    except Exception as error:  # Damaged metadata can raise anything.
        raise UserError(f"{prefix}path={path}, split {split}: {first_line(error)}") from error
    take = _find_languages(tfds, builder.info.features, languages, f"{prefix}path={path}", prefix)
    name = f"{path}/{split}"

    def pairs(reading: Reading) -> Iterator[tuple[str, str] | None]:
        _check_lengths(files, name)
        is_empty = True
        for pair in _pairs(records, take, name, reading):
            is_empty = False
            yield pair
        reading.check()
        if is_empty:
            raise UserError(f"{name} has no example in {' and '.join(filter(None, languages))}")

    return Source(name, pairs, lambda: _digest(records, languages))


def _check_classes(tfds: Any, path: Path) -> None:
    """Checks that a description of features names none but those of TensorFlow Datasets.

    Any other module that it names would be imported.
    """
    kinds = (getattr(tfds.features, name) for name in dir(tfds.features))
    known = {f"{kind.__module__}.{kind.__name__}" for kind in kinds if isinstance(kind, type)}
    remaining = [read_json(path)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            for key, name in value.items():
                # In the JSON of Protocol Buffers, or of earlier versions.
                is_name = key in ("pythonClassName", "python_class_name", "type")
                if is_name and isinstance(name, str) and name not in known:
                    raise UserError(f"{path} names {name}, not a feature of TensorFlow Datasets")
            remaining += value.values()
        elif isinstance(value, list):
            remaining += value


def _check_lengths(files: Any, name: str) -> None:
    from array_record.python.array_record_module import ArrayRecordReader

    for file in files:
        try:
            with contextlib.closing(ArrayRecordReader(file.filename)) as reader:
                found = reader.num_records()
        except RuntimeError:  # Reading will say what is damaged.
            return
        if found != file.examples_in_shard:
            raise UserError(
                f"{name} cannot be read: {file.filename} has {found} examples, not "
                f"{file.examples_in_shard} as in dataset_info.json"
            )


def _how_to_prepare(path: str, is_folder: bool, prefix: str) -> str:
    if is_folder:
        return (
            f"{prefix}path={path} is not prepared as array_record, the only format that can be "
            "read without TensorFlow; prepare it again with file_format='array_record'"
        )
    return (
        f"{prefix}path={path} is not prepared as array_record; prepare it once with tensorflow "
        f"(pip install 'flaxformer_mt[tensorflow]'): tensorflow_datasets.builder({path!r}, "
        "file_format='array_record').download_and_prepare()"
    )


def _find_languages(
    tfds: Any, features: Any, languages: LanguagePair, where: str, prefix: str
) -> _Take:
    kinds = (tfds.features.Translation, tfds.features.TranslationVariableLanguages)
    if isinstance(features, kinds):
        key, feature = None, features
    else:
        parts = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
        key = next((name for name, part in parts.items() if isinstance(part, kinds)), None)
        if key is None:
            found = ", ".join(parts) or type(features).__name__
            raise UserError(f"{where} has no feature Translation, only {found}")
        feature = features[key]
    is_fixed = isinstance(feature, kinds[0])
    known = sorted(feature) if is_fixed else feature.languages
    sides = [language for language in languages if language]
    for language in sides:
        if known and chosen(known, [language]) is None:
            side = "target" if language == languages[1] else "source"
            raise UserError(
                f"{prefix}{side}_language={language}: {where} has only {', '.join(known)}"
            )

    @functools.lru_cache(256)
    def find(codes: tuple[str, ...]) -> list[str] | None:
        found = chosen(codes, sides)
        return None if found is None else [codes[index] for index in found]

    def take(example: Any) -> tuple[bytes, bytes] | None:
        texts = example if key is None else example[key]
        if not is_fixed:
            texts = _by_language(texts)
        codes = find(tuple(texts))
        if codes is None:
            return None
        source, target = [b"", *(texts[code] for code in codes)][-2:]
        return source, target

    return take


def _by_language(translations: Any) -> dict[str, bytes]:
    """Maps each language to its first translation in {"language": ..., "translation": ...}."""
    listed = zip(translations["language"], translations["translation"], strict=True)
    return {language.decode(): text for language, text in reversed(list(listed))}
