"""The data of a run: corpora, tokenizers, the training stream and the evaluation sets."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import (
    Corpus,
    ParallelCorpus,
    Role,
    StreamedCorpus,
    open_corpora,
    read_corpus,
)
from flaxformer_mt.data.corpora.entities import notes_of, warn_of_notes
from flaxformer_mt.data.corpora.hold_out import hold_out
from flaxformer_mt.data.corpora.shared_text import NO_TEXT, HeldOutText
from flaxformer_mt.data.sanity_checks import check_unknown_rate
from flaxformer_mt.data.stream.blocks import Curriculum
from flaxformer_mt.data.stream.encoded_corpus import EncodedCorpus, encode_corpus
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.stream.training_stream import TrainingStream
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

_EXAMPLES = 3  # Training pairs in the report of a starting run.


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """A development or test set: its text and its tokens."""

    texts: ParallelCorpus
    tokens: EncodedCorpus


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The training stream of a run, and its evaluation sets."""

    tokenizers: Tokenizers
    training: TrainingStream
    valid: EvaluationSet
    test: EvaluationSet | None
    divisions: Sequence[Mapping[str, int]] = ()
    """What each training corpus was divided into, see `Corpus.division`; {} for all of it."""

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """The development set and, if there is one, the test set, by split."""
        sets = {"valid": self.valid, "test": self.test}
        return {split: each for split, each in sets.items() if each is not None}

    def report(self) -> Iterator[tuple[str, str]]:
        """Yields the lines about the data at the start of a run, each with its label."""
        divisions = self.divisions or [{}] * len(self.training.corpora)
        for corpus, division in zip(self.training.corpora, divisions, strict=True):
            yield "train", corpus.name
            if division:
                yield "", _described(division)
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


def _described(division: Mapping[str, int]) -> str:
    parts = [f"{division['train']:,} of {division['lines']:,} pairs to train on"]
    roles = [role for role in ("valid", "test") if role in division]
    parts += [f"{division[role]:,} held out for {role}" for role in roles]
    if division["left_out"]:
        parts.append(
            f"{division['left_out']:,} left out, with the source or the target of a held-out pair"
        )
    return "; ".join(parts)


def open_all(
    config: ExperimentConfig,
    roles: Sequence[Role] = ("train", "valid", "test"),
    cache_folder: Path | None = None,
) -> dict[str, list[Corpus]]:
    """Opens the corpora of each role (there may be none for "test"), without reading them.

    Which pairs are held out is kept in the cache folder.
    """
    data, held_out = config.data, config.data.held_out_roles

    def opened(role: Role) -> list[StreamedCorpus]:
        return open_corpora(data, role, config.model.has_inputs)

    divided: dict[str, list[Corpus]] = {}
    if held_out and {"train", *held_out} & {*roles}:
        divided = hold_out(opened("train"), data, config.model.has_inputs, cache_folder)
    return {role: divided[role] if role in divided else [*opened(role)] for role in roles}


def open_dataset(
    config: ExperimentConfig,
    corpora: Mapping[str, Sequence[Corpus]],
    tokenizers: Tokenizers,
    cache_folder: Path,
    *,
    held_out: HeldOutText = NO_TEXT,
    verify: bool = True,
    curriculum: Curriculum | None = None,
) -> tuple[ExperimentConfig, Dataset]:
    """Filters, tokenizes and checks the corpora of `open_all`, and plans the batches.

    The tokens of training corpora are stored in the cache folder, and `held_out` is looked for in
    their text, see `open_stores`.

    Returns:
      The configuration with vocabulary sizes and row lengths, and the dataset.

    Raises:
      UserError: a corpus cannot be read or used, no pair fits into a row, or a table of the model
        is smaller than the vocabulary.
    """

    def evaluation_set(role: Role) -> EvaluationSet:
        texts = read_corpus(corpora[role])
        warn_of_notes(texts.name, notes_of(texts.pairs()))
        return EvaluationSet(texts, encode_corpus(texts, tokenizers, config.model))

    valid = evaluation_set("valid")
    test = evaluation_set("test") if corpora["test"] else None
    stores = open_stores(
        *(cache_folder, corpora["train"], tokenizers, config), held_out=held_out, verify=verify
    )
    for encoded in (*stores, valid.tokens, *([test.tokens] if test else [])):
        check_unknown_rate(encoded, config.data)
    config = dataclasses.replace(config, model=_with_tables(config.model, tokenizers))
    stream = TrainingStream(stores, config, tokenizers.source, curriculum=curriculum)
    divisions = [corpus.division() if corpus.division else {} for corpus in corpora["train"]]
    return stream.config, Dataset(tokenizers, stream, valid, test, divisions)


def _with_tables(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """Returns the model with the sizes of the vocabularies, where it leaves them open."""
    for side in ("source", "target") if model.has_inputs else ("target",):
        size = getattr(model, f"{side}_vocab_size")
        needed = getattr(tokenizers, side).vocab_size
        if 0 < size < needed:
            raise UserError(
                f"model.{side}_vocab_size={size} is less than the {needed} tokens of the "
                "vocabulary: leave it out, or give 0"
            )
    return tokenizers.with_sizes(model)
