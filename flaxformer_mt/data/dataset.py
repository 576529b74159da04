"""The data of a run: corpora, tokenizers, the training stream and the evaluation sets."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flaxformer_mt.config import ExperimentConfig, with_vocabulary_sizes
from flaxformer_mt.data.corpora.corpus import Corpus, ParallelCorpus, open_corpora, read_corpus
from flaxformer_mt.data.sanity_checks import check_unknown_rate
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus, encode_corpus
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.stream.training_stream import TrainingStream, choose_source_row_length
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """A development or test set, in memory."""

    texts: ParallelCorpus
    tokens: EncodedCorpus


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The training and evaluation data of a run."""

    config: ExperimentConfig
    """The experiment, with what it left to the data filled in: vocabulary sizes, row length."""
    tokenizers: Tokenizers
    training: TrainingStream
    valid: EvaluationSet
    test: EvaluationSet

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the lines about the data in the report of a starting run, with their headings."""
        for corpus in self.training.corpora:
            yield "train", corpus.name
            yield from (("", line) for line in corpus.report.details())
        for split, evaluated in (("valid", self.valid), ("test", self.test)):
            yield split, f"{evaluated.tokens.name}: {evaluated.tokens.report}"
        fill = self.training.fill
        sides = f"{fill.target:.1%} of the target positions used"
        if self.config.model.has_inputs:
            sides = f"{fill.source:.1%} of the source and {sides}"
        shapes = "; ".join(
            f"{shape.rows} rows of {shape.source_length} source and {shape.target_length} target "
            "tokens"
            for shape in self.training.shapes
        )
        yield "batches", f"{shapes}; {sides}; {self.training.batches_per_epoch:,.1f} per epoch"


def open_all(config: ExperimentConfig) -> dict[str, list[Corpus]]:
    """Opens the corpora of "train", "valid" and "test" without reading them.

    Raises:
      UserError: see `open_corpora`.
    """
    has_inputs = config.model.has_inputs
    return {
        "train": open_corpora(config.data, "train", has_inputs),
        "valid": open_corpora(config.data, "valid", has_inputs),
        "test": open_corpora(config.data, "test", has_inputs),
    }


def open_dataset(
    config: ExperimentConfig,
    corpora: Mapping[str, Sequence[Corpus]],
    tokenizers: Tokenizers,
    cache_folder: Path,
) -> Dataset:
    """Tokenizes and checks all corpora, and plans the batches.

    Args:
      config: the experiment.
      corpora: from `open_all`.
      tokenizers: the vocabularies of the run.
      cache_folder: folder of the tokenized training corpora, which are reused if up to date.

    Raises:
      UserError: a corpus cannot be read or used.
    """
    config = dataclasses.replace(
        config,
        model=with_vocabulary_sizes(
            config.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
        ),
    )
    valid, test = (
        _evaluation_set(corpora[split], tokenizers, config) for split in ("valid", "test")
    )
    stores = open_stores(cache_folder, corpora["train"], tokenizers, config)
    for encoded in (*stores, valid.tokens, test.tokens):
        check_unknown_rate(encoded, config.data)
    if not config.data.source_row_length:
        length = choose_source_row_length(stores, config, tokenizers.source)
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, source_row_length=length)
        )
    stream = TrainingStream(stores, config, tokenizers.source)
    return Dataset(config, tokenizers, stream, valid, test)


def _evaluation_set(
    corpora: Sequence[Corpus], tokenizers: Tokenizers, config: ExperimentConfig
) -> EvaluationSet:
    texts = read_corpus(corpora)
    return EvaluationSet(texts, encode_corpus(texts, tokenizers, config))
