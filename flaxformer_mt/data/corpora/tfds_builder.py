"""Builds a TensorFlow Datasets data set from local parallel text, without TensorFlow.

The result has the layout of the WMT builders: the feature `Translation` in array_record files,
which allow random access, so that several runs can share them.
`tensorflow_datasets.builder_from_directory(folder)` opens it, and so does

    python train.py --data.corpus=tfds --data.path=FOLDER ...

The order of the pairs is kept; training shuffles them anyway.
"""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.corpora.text_files import counted
from flaxformer_mt.data.corpora.tfds_reader import require_tfds
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic

DATASET_NAME = "parallel_text"
"""Name of every data set built here."""

SHARD_BYTES = 256 << 20
"""Size at which a file is closed and the next one started."""

_VERSION = "1.0.0"
_SUFFIX = "array_record"
# Random access to single records, as in files written by TensorFlow Datasets itself.
_WRITER_OPTIONS = "group_size:1"


def build_dataset(
    splits: Mapping[str, Corpus],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, int]:
    """Writes a data set to a new folder atomically, and returns the number of pairs in each split.

    Args:
      splits: the corpus of each split, by name; all have the same two languages.
      folder: must not exist.
      shard_bytes: approximate size of a file.
    """
    atomic.require_absent(folder)  # Fails before the text is read.
    tfds = require_tfds()
    languages = {language for corpus in splits.values() for language in corpus.languages}
    if len(languages) != 2:
        raise UserError(f"a data set has two languages, not {len(languages)}: {sorted(languages)}")
    features = tfds.features.Translation(sorted(languages))
    for name in splits:
        if not name.isidentifier():
            raise UserError(f"a split cannot be called {name!r}: use letters, digits and _")
    try:
        with atomic.new_folder(folder) as partial:
            infos = [
                _write_split(tfds, partial, features, name, corpus, shard_bytes)
                for name, corpus in splits.items()
            ]
            tfds.folder_dataset.write_metadata(
                data_dir=partial,
                features=features,
                split_infos=infos,
                filename_template=_file_names(tfds, partial),
                version=_VERSION,
                description="Parallel text, made by `flaxformer-mt prepare`.",
                check_data=False,  # Requires TensorFlow.
            )
    except RuntimeError as error:  # array_record: "write() failed: No space left on device; ..."
        raise UserError(f"{folder} cannot be written: {error}") from error
    return {info.name: info.num_examples for info in infos}


def _file_names(tfds: Any, folder: Path, **facts: str) -> Any:
    """Returns the template of file names: parallel_text-train.array_record-00000-of-00004."""
    return tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=DATASET_NAME, filetype_suffix=_SUFFIX, **facts
    )


def _write_split(
    tfds: Any,
    folder: Path,
    features: Any,
    name: str,
    corpus: Corpus,
    shard_bytes: int,
) -> Any:
    """Writes the files of one split; returns its `tfds.core.SplitInfo`."""
    from array_record.python.array_record_module import ArrayRecordWriter

    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    records = (
        # By default the order of the languages differs between processes.
        serializer.get_tf_example(
            features.encode_example(dict(zip(corpus.languages, pair, strict=True)))
        ).SerializeToString(deterministic=True)
        for pair in counted(corpus.pairs(), f"writing {name}")
    )
    lengths: list[int] = []
    num_bytes = 0
    for first in records:
        path = folder / f"{name}-{len(lengths)}.unfinished"
        number = size = 0
        with contextlib.closing(ArrayRecordWriter(str(path), _WRITER_OPTIONS)) as writer:
            for record in itertools.chain([first], records):
                writer.write(record)
                number += 1
                size += len(record)
                if size >= shard_bytes:
                    break
        lengths.append(number)
        num_bytes += size
    # File names contain the number of files.
    file_names = _file_names(tfds, folder, split=name)
    for index in range(len(lengths)):
        path = file_names.sharded_filepath(shard_index=index, num_shards=len(lengths))
        (folder / f"{name}-{index}.unfinished").rename(path)
    return tfds.core.SplitInfo(
        name=name, shard_lengths=lengths, num_bytes=num_bytes, filename_template=file_names
    )
