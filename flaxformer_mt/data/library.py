"""Sentence pairs, vocabularies and batches for training scripts, without a configuration file.

The stream of `packed` is the one that training runs read: the same batches, in the same order.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np
from jax.sharding import Mesh

from flaxformer_mt import atomic
from flaxformer_mt.config import (
    CONTINUATIONS,
    DataConfig,
    ExperimentConfig,
    TrainConfig,
    TransformerConfig,
    to_dict,
)
from flaxformer_mt.config.data import CorpusKind, PackingOptions, Quoting, VocabularyOptions
from flaxformer_mt.config.fields import FieldRole, names_with, suggestion
from flaxformer_mt.data.corpora.corpus import (
    Corpus,
    ParallelCorpus,
    open_path,
    read_corpus,
    with_alignments,
)
from flaxformer_mt.data.stream.batches import Batch, BatchShape, make_batch, whole_batches
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.stream.mixture import TOO_LONG
from flaxformer_mt.data.stream.packing import TokenPairs
from flaxformer_mt.data.stream.placement import own_shard, place_batch, row_shards
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.stream.training_stream import TrainingStream
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError, UserTypeError
from flaxformer_mt.runs.states import name_of

_log = logging.getLogger(__name__)

Pairs: TypeAlias = Corpus | Iterable[tuple[str, str]]
"""What `read_pairs` returns, or pairs of a source and a target sentence."""


def read_pairs(
    path: str | Path,
    *,
    columns: Sequence[int | str] | Mapping[str, int | str] = (),
    weights: int | str = "",
    source_language: str = "",
    target_language: str = "",
    split: str = "train",
    kind: CorpusKind = "text",
    tag: str = "",
    weight: float = 1.0,
    alignments: str | Path = "",
    quoting: Quoting = "auto",
    bad_rows: Literal["error", "drop"] = "error",
) -> Corpus:
    """Opens sentence pairs; they are read when they are used.

        pairs = fmt.read_pairs("mine.tsv", columns=(1, 2))
        pairs = fmt.read_pairs("multi30k", source_language="en", target_language="de")
        for source, target in pairs.pairs():
            ...

    Args:
      path: anything that `data.path` may name (docs/data.md): a table (.tsv, .csv, .jsonl,
        .parquet, .tmx), two parallel files "a.en,a.de", a folder of files `SPLIT.LANGUAGE`, of
        `flaxformer-mt prepare` or of Hugging Face's `save_to_disk`, or "tfds:NAME".
      columns: the columns of source and target in a table, by number from 1 or by name; or columns
        by the names that you give them, {"source": 1, "target": 2, "quality": 3}. Those beside
        "source" and "target" have a number per pair, and become `Batch.columns`.
      weights: the column of the weights of pairs in the loss, from 0 on.
      source_language: its code, the suffix of its files in a folder.
      target_language: of the translations.
      split: of a folder or a data set.
      kind: of files in a folder, if they are not text: "tsv", "csv", "jsonl", ... or "tfds".
      tag: prepended to every source, such as "<2de>".
      weight: sampling weight of these pairs relative to others, in `packed`.
      alignments: a file of word alignments, as `data.alignments`; without `tag`.
      quoting: whether cells of tables are quoted, as `data.quoting`.
      bad_rows: what happens to malformed rows, as `data.bad_rows`.

    Raises:
      UserError: there is no such text.
    """
    named = (
        {name: str(column) for name, column in dict(columns).items()}
        if isinstance(columns, Mapping)
        else {}
    )
    sides = [named.pop(side) for side in ("source", "target") if side in named]
    if weights:
        named["weight"] = str(weights)
    data = DataConfig(
        corpus=kind,
        path=str(path),
        columns=tuple(sides if isinstance(columns, Mapping) else map(str, columns)),
        pair_columns=tuple(f"{name}={column}" for name, column in named.items()),
        source_language=source_language,
        target_language=target_language,
        quoting=quoting,
        bad_rows=bad_rows,
    )
    corpus = open_path(data, split, tag=tag, weight=weight)
    return with_alignments(corpus, Path(alignments), "alignments") if alignments else corpus


def train_tokenizers(
    pairs: Pairs | Sequence[Corpus],
    *,
    size: int = 8000,
    joint: bool = True,
    **options: Unpack[VocabularyOptions],
) -> Tokenizers:
    """Learns the vocabularies of both sides.

        tokenizers = fmt.train_tokenizers(pairs, size=8000)
        config = fmt.TransformerConfig(d_model=256, num_heads=4, **tokenizers.fields)

    Args:
      pairs: the text, of one corpus or of several.
      size: of each vocabulary; small corpora get a smaller one.
      joint: whether both sides share a vocabulary.
      options: further options of vocabularies, as of `data` in a configuration: `tokenizer`
        ("bpe", "unigram", "word" or "bytes"), `byte_fallback`, `character_coverage`,
        `normalization` ("nfc", "nfkc" or "none"), `keep_whole`.

    Raises:
      TypeError: there is no such option.
      UserError: the text cannot be read, or is too small for a vocabulary.
    """
    _require_known(options, VocabularyOptions)
    data = DataConfig(vocab_size=size, joint_vocabulary=joint, **options)
    return Tokenizers.train(_corpora(pairs), data)


def packed(
    pairs: Pairs | Sequence[Corpus],
    tokenizers: Tokenizers,
    config: TransformerConfig,
    *,
    rows: int,
    length: int | tuple[int, int],
    seed: int = 0,
    cache: str | Path | None = None,
    curriculum: Curriculum | None = None,
    **options: Unpack[PackingOptions],
) -> TrainingStream:
    """Tokenizes pairs and packs them into the rows of batches, several pairs per row.

        data = fmt.packed(pairs, tokenizers, config, rows=256, length=64, seed=0)

    The batches are a function of the arguments and of the position. Positions carry a record of
    all that the batches depend on: pairs, vocabularies, model and options. `Checkpoints` and
    `batches` refuse a position of another stream. A warning is logged if pairs are dropped or
    truncated, with their number.

    Args:
      pairs: one corpus or several, which are mixed in proportion to their sizes and weights.
      tokenizers: the vocabularies.
      config: of the model, for its special tokens and the longest sentence.
      rows: B, the rows of a batch, of all devices together.
      length: S and T, the tokens of a row; one number for both.
      seed: of the order of the pairs.
      cache: a folder for the tokens, which are memory-mapped; they are used again as long as text,
        vocabulary and filters do not change. By default they are temporary files.
      curriculum: a function `curriculum(epoch, lengths, columns)` that returns how often pairs are
        used in an epoch, float [N]: 0.3 of a pair is drawn with this probability, 2 is twice. It
        gets the number of the epoch from 0, source and target lengths in tokens, int [N, 2], and
        `Batch.columns` by name, float32 [N] each. Its name and options are part of the position.
      options: further options, as of `data` in a configuration: `batching="buckets"` with
        `bucket_lengths`, `mixture_temperature`, `subword_sampling`, `long_sentences`, `workers`
        (by default 0 without `cache`), and filters such as `max_words`, `max_length_ratio` and
        `drop_duplicates`.

    Raises:
      TypeError: there is no such option.
      UserError: the text cannot be read, or no pair fits into a row.
    """
    _require_known(options, PackingOptions)
    if cache is None:  # Workers would need the temporary files in memory.
        options.setdefault("workers", 0)
    name = "" if curriculum is None else name_of(curriculum, "curriculum")
    experiment = _experiment(config, rows, length, seed, name, **options)
    with contextlib.ExitStack() as stack:
        if cache is None:
            # A mapped file can be read after its name is removed, and does not outlive the process.
            cache = stack.enter_context(atomic.temporary_folder())
        corpora = _corpora(pairs)
        stores = open_stores(Path(cache), corpora, tokenizers, experiment)
    identity = json.dumps(_identity(corpora, tokenizers, experiment, rows), sort_keys=True)
    stream = TrainingStream(stores, experiment, tokenizers.source, identity, curriculum)
    for corpus in stream.corpora:
        if corpus.report.is_changed:
            advice = ""
            if TOO_LONG in corpus.report.dropped or corpus.report.truncated:
                advice = f"; raise length={stream.config.data.row_lengths}"
            if TOO_LONG in corpus.report.dropped:
                advice += ', or give long_sentences="truncate"'
            _log.warning("%s: %s%s", corpus.name, corpus.report.changes(), advice)
    return stream


def _identity(
    corpora: Sequence[Corpus], tokenizers: Tokenizers, experiment: ExperimentConfig, rows: int
) -> dict[str, Any]:
    """Returns what the batches of `packed` depend on, and the model, as JSON values."""
    options = to_dict(experiment)
    model = {
        f"model.{name}": value
        for name, value in options["model"].items()
        if CONTINUATIONS[f"model.{name}"] in ("accepted", "never")
    }
    data = {
        name: options["data"][name]
        for name in names_with(DataConfig, FieldRole.TOKENS, FieldRole.ROWS)
    }
    return {
        "pairs": [corpus.fingerprint for corpus in corpora],
        "tags": [corpus.tag for corpus in corpora],
        "weights": [corpus.weight for corpus in corpora],
        "languages": [corpus.languages for corpus in corpora],
        "source vocabulary": tokenizers.source.fingerprint,
        "target vocabulary": tokenizers.target.fingerprint,
        "seed": experiment.train.seed,
        "rows": rows,
        **data,
        **model,
    }


def evaluation_batches(
    pairs: Pairs | Sequence[Corpus],
    tokenizers: Tokenizers,
    config: TransformerConfig,
    mesh: Mesh,
    *,
    rows: int,
    length: int | tuple[int, int],
) -> list[Batch]:
    """Makes batches with every pair exactly once and whole, as training runs validate with.

        batches = fmt.evaluation_batches(valid, tokenizers, config, mesh, rows=256, length=64)
        sums = [evaluate(params, batch) for batch in batches]

    Pairs that fit are packed. A longer pair gets a row of its own, whose length is the next power
    of two. There are as few shapes as possible, and empty rows fill the last batch of each.

    Args:
      pairs: one corpus or several.
      tokenizers: the vocabularies.
      config: of the model, for its special tokens and the longest sentence.
      mesh: where the rows are placed; each of several processes calls this, and places its part.
      rows: the most rows of a batch, of all devices together. There are fewer if the logits would
        take more than half a GiB on each device.
      length: S and T, the tokens of a row; one number for both.

    Raises:
      UserError: the text cannot be read, a pair is longer than the model's learned positions, or
        the devices cannot share out the rows.
    """
    encoded = encode_corpus(read_corpus(_corpora(pairs)), tokenizers, config)
    experiment = _experiment(tokenizers.with_sizes(config), rows, length)
    found = whole_batches(encoded, experiment, row_shards(mesh), own_shard(mesh))
    return [place_batch(batch, mesh) for batch in found]


def _experiment(
    model: TransformerConfig,
    rows: int,
    length: int | tuple[int, int],
    seed: int = 0,
    curriculum: str = "",
    **options: Unpack[PackingOptions],
) -> ExperimentConfig:
    """Returns the configuration of batches of `rows` rows; `options` as of `data`."""
    source, target = (length, length) if isinstance(length, int) else length
    data = DataConfig(
        source_row_length=source, target_row_length=target, curriculum=curriculum, **options
    )
    train = TrainConfig(seed=seed, batch_tokens=rows * data.row_lengths[1])
    return ExperimentConfig(model=model, data=data, train=train)


def padded(
    pairs: Sequence[tuple[str, str]],
    tokenizers: Tokenizers,
    config: TransformerConfig,
    *,
    length: int | tuple[int, int],
    mesh: Mesh | None = None,
) -> Batch:
    """Makes a batch with one pair per row, in the given order.

        batch = fmt.padded([("a dog", "ein Hund")], tokenizers, config, length=32)

    Args:
      pairs: B sentences and their translations.
      tokenizers: the vocabularies.
      config: of the model, for its special tokens.
      length: S and T, the tokens of a row; one number for both. Longer sentences are truncated,
        and a warning has their number.
      mesh: where to place the rows; by default they are NumPy arrays.
    """
    source_length, target_length = (length, length) if isinstance(length, int) else length
    texts = ParallelCorpus([source for source, _ in pairs], [target for _, target in pairs], "")
    encoded = encode_corpus(texts, tokenizers, config)
    limits = source_length, target_length
    too_long = [sides > limit for sides, limit in zip(encoded.lengths, limits, strict=True)]
    if np.any(too_long):
        _log.warning(
            "%s of %s pairs are truncated: they are longer than length=%s",
            f"{np.count_nonzero(np.any(too_long, axis=0)):,}",
            f"{len(pairs):,}",
            limits,
        )
    sources = encoded.sources
    batch = make_batch(
        TokenPairs(
            None if sources is None else sources.truncate(source_length, config.eos_id),
            encoded.targets.truncate(target_length, config.eos_id),
        ),
        [[number] for number in range(len(pairs))],
        BatchShape(len(pairs), source_length, target_length),
        config,
    )
    return batch if mesh is None else place_batch(batch, mesh)


def _require_known(options: Mapping[str, Any], kind: type) -> None:
    known = kind.__annotations__
    for name in options.keys() - known.keys():
        raise TypeError(f"there is no option {name}{suggestion(name, known)}")


def _corpora(pairs: Pairs | Sequence[Corpus]) -> list[Corpus]:
    if isinstance(pairs, Corpus):
        return [pairs]
    if isinstance(pairs, str | Path):
        raise UserTypeError(f"{pairs} is a path, not pairs: give fmt.read_pairs({str(pairs)!r})")
    items = list(pairs)
    if not items:
        raise UserError("there are no pairs: give at least one source and target sentence")
    if isinstance(items[0], Corpus):
        return [each for each in items if isinstance(each, Corpus)]
    sources, targets = zip(*items, strict=True)
    return [ParallelCorpus([*sources], [*targets], "the given pairs")]
