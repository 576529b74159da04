"""The data of a run: corpora, tokenizers, the training stream and the evaluation sets."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flaxformer_mt.config import ExperimentConfig, with_vocabulary_sizes
from flaxformer_mt.config.data import HeldOutRole
from flaxformer_mt.data.corpora.corpus import Corpus, ParallelCorpus, open_corpora, read_corpus
from flaxformer_mt.data.corpora.hold_out import hold_out
from flaxformer_mt.data.sanity_checks import check_unknown_rate
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus, encode_corpus
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.stream.training_stream import TrainingStream, choose_source_row_length
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

_EXAMPLES = 3  # Training pairs in the report of a starting run.


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """A development or test set: its text and its tokens."""

    texts: ParallelCorpus
    tokens: EncodedCorpus


@dataclasses.dataclass(frozen=True)
class TokenizedCorpora:
    """The corpora of a run as tokens; independent of row lengths."""

    training: list[EncodedCorpus]
    valid: EvaluationSet
    test: EvaluationSet | None
    """None if the experiment has no test split."""

    @property
    def held_out(self) -> list[EncodedCorpus]:
        """The tokens of the development set and, if there is one, of the test set."""
        return [each.tokens for each in (self.valid, self.test) if each is not None]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The training stream of a run, and its evaluation sets."""

    tokenizers: Tokenizers
    training: TrainingStream
    valid: EvaluationSet
    test: EvaluationSet | None

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """The development set and, if there is one, the test set, by split."""
        sets = {"valid": self.valid, "test": self.test}
        return {split: each for split, each in sets.items() if each is not None}

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the lines about the data at the start of a run, each with its label."""
        for corpus in self.training.corpora:
            yield "train", corpus.name
            yield from (("", line) for line in corpus.report.details())
        for split, evaluated in self.evaluation_sets.items():
            yield split, f"{evaluated.tokens.name}: {evaluated.tokens.report}"
        fill = self.training.fill
        sides = f"{fill.target:.1%} of the target positions in use"
        if self.valid.tokens.sources is not None:
            sides = f"{fill.source:.1%} of the source and {sides}"
        shapes = "; ".join(
            f"{shape.rows} rows of {shape.source_length} source and {shape.target_length} target "
            "tokens"
            for shape in self.training.shapes
        )
        yield "batches", f"{shapes}; {sides}; {self.training.batches_per_epoch:,.1f} per epoch"
        yield "vocab", self.tokenizers.describe()
        yield from self._examples()

    def _examples(self) -> Iterator[tuple[str, str]]:
        """Yields training pairs as the model sees them: as tokens, separated by spaces."""
        corpus = self.training.corpora[0]
        for number in range(_EXAMPLES):
            # Sorted files begin with their shortest pairs.
            index = (2 * number + 1) * len(corpus.targets) // (2 * _EXAMPLES)
            target = self.tokenizers.target.pieces(corpus.targets[index].tolist())
            if corpus.sources is None:
                yield "example", " ".join(target)
            else:
                source = self.tokenizers.source.pieces(corpus.sources[index].tolist())
                yield "example", f"{' '.join(source)} | {' '.join(target)}"


def open_all(config: ExperimentConfig) -> dict[str, list[Corpus]]:
    """Opens the corpora of "train", "valid" and "test" (there may be none), without reading them.

    Raises:
      UserError: a file, a builder, a split or a language does not exist.
    """
    data, has_inputs = config.data, config.model.has_inputs
    held_out = data.held_out_roles
    training = open_corpora(data, "train", has_inputs)
    opened: dict[str, list[Corpus]] = {"train": [*training]}
    others: tuple[HeldOutRole, ...] = ("valid", "test")
    for role in others:
        if role not in held_out:
            opened[role] = [*open_corpora(data, role, has_inputs)]
    return opened | hold_out(training, data.hold_out, held_out) if held_out else opened


def open_held_out(config: ExperimentConfig, role: HeldOutRole) -> list[Corpus]:
    """Opens the corpora of "valid" or "test" alone; see `open_all`."""
    data, has_inputs, held_out = config.data, config.model.has_inputs, config.data.held_out_roles
    if role in held_out:
        return hold_out(open_corpora(data, "train", has_inputs), data.hold_out, held_out)[role]
    return [*open_corpora(data, role, has_inputs)]


def tokenize(
    config: ExperimentConfig,
    corpora: Mapping[str, Sequence[Corpus]],
    tokenizers: Tokenizers,
    cache_folder: Path,
    *,
    verify: bool = True,
) -> TokenizedCorpora:
    """Filters, tokenizes and checks the corpora of `open_all`.

    Vocabulary sizes and row lengths of the configuration are not used. The tokens of training
    corpora are stored in the cache folder, and read from there if they are; see `open_stores`.

    Raises:
      UserError: a corpus cannot be read or used.
    """
    valid = _evaluation_set(corpora["valid"], tokenizers, config)
    test = _evaluation_set(corpora["test"], tokenizers, config) if corpora["test"] else None
    stores = open_stores(cache_folder, corpora["train"], tokenizers, config, verify=verify)
    tokens = TokenizedCorpora(stores, valid, test)
    for encoded in (*stores, *tokens.held_out):
        check_unknown_rate(encoded, config.data)
    return tokens


def resolve_config(
    config: ExperimentConfig, tokens: TokenizedCorpora, tokenizers: Tokenizers
) -> ExperimentConfig:
    """Returns the configuration with what it leaves to the data: vocabulary sizes, row lengths.

    Raises:
      UserError: a table of the model is smaller than the vocabulary.
    """
    for side in ("source", "target") if config.model.has_inputs else ("target",):
        size = getattr(config.model, f"{side}_vocab_size")
        needed = getattr(tokenizers, side).vocab_size
        if 0 < size < needed:
            raise UserError(
                f"model.{side}_vocab_size={size} is less than the {needed} tokens of the "
                "vocabulary: leave it out, or give 0"
            )
    model = with_vocabulary_sizes(
        config.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
    )
    config = dataclasses.replace(config, model=model)
    if config.data.source_row_length:
        return config
    length = choose_source_row_length(tokens.training, config, tokenizers.source)
    data = dataclasses.replace(config.data, source_row_length=length)
    return dataclasses.replace(config, data=data)


def open_dataset(
    config: ExperimentConfig, tokens: TokenizedCorpora, tokenizers: Tokenizers
) -> Dataset:
    """Plans the batches of an experiment, whose configuration is from `resolve_config`.

    Raises:
      UserError: no pair fits into a row.
    """
    stream = TrainingStream(tokens.training, config, tokenizers.source)
    return Dataset(tokenizers, stream, tokens.valid, tokens.test)


def _evaluation_set(
    corpora: Sequence[Corpus], tokenizers: Tokenizers, config: ExperimentConfig
) -> EvaluationSet:
    texts = read_corpus(corpora)
    return EvaluationSet(texts, encode_corpus(texts, tokenizers, config))
