"""Handling of training pairs that are longer than a row: drop, truncate or reject."""

import dataclasses

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.filters import Dropped
from flaxformer_mt.data.stream.batches import pair_lengths
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus
from flaxformer_mt.errors import UserError


def select_pairs(corpus: EncodedCorpus, config: DataConfig) -> tuple[EncodedCorpus, np.ndarray]:
    """Selects the pairs to train on, according to `data.long_sentences`.

    Args:
      corpus: pairs of any length.
      config: gives the row lengths.

    Returns:
      The corpus, with a report that includes the pairs longer than a row, and the ascending indices
      of the pairs to train on, int64 [kept]. Truncation is left to the caller.

    Raises:
      UserError: a pair is longer than a row and `data.long_sentences` is "error", or no pair is
        left.
    """
    source_row_length, target_row_length = config.row_lengths
    source_lengths, target_lengths = pair_lengths(corpus)
    fits = (source_lengths <= source_row_length) & (target_lengths <= target_row_length)
    too_long = np.flatnonzero(~fits)
    if not len(too_long):
        return corpus, np.arange(len(fits))

    first = too_long[0]
    example = (
        f"pair {first + 1:,} ({source_lengths[first]:,} source and {target_lengths[first]:,} "
        "target tokens)"
    )
    problem = (
        f"{corpus.name}: {len(too_long):,} of {len(fits):,} pairs are longer than a row "
        f"({_row_lengths(config)}), the first is {example}"
    )
    if config.long_sentences == "error":
        raise UserError(f"{problem}; raise it, or set data.long_sentences to drop or truncate")
    if config.long_sentences == "truncate":
        report = corpus.report.fitted_to_rows(truncated=len(too_long))
        return dataclasses.replace(corpus, report=report), np.arange(len(fits))
    if len(too_long) == len(fits):
        raise UserError(f"{problem}; raise it, or set data.long_sentences to truncate")
    report = corpus.report.fitted_to_rows(Dropped(len(too_long), example))
    return dataclasses.replace(corpus, report=report), np.flatnonzero(fits)


def _row_lengths(config: DataConfig) -> str:
    """Returns the options that determine the row lengths, with their values."""
    if config.batching == "buckets":
        return f"the last of data.bucket_lengths={config.bucket_lengths}"
    return (
        f"data.source_row_length={config.source_row_length}, "
        f"data.target_row_length={config.target_row_length}"
    )
