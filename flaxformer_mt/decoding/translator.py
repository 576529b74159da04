"""Text in, text out."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
from rich.console import Console
from rich.progress import track

from flaxformer_mt.config import (
    DecodeConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.ensemble import require_same_vocabularies
from flaxformer_mt.decoding.scoring.scorer import Unit
from flaxformer_mt.decoding.sentence_decoder import Hypothesis, Sentence, SentenceDecoder
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.layout import CheckpointSelector
from flaxformer_mt.runs.trained_model import TrainedModel, load_run

WINDOW = 128
"""Characters that `Translator.stream` reads before the first is translated, for each token of a
batch: enough for some thirty batches, of which the last are not full."""

_T = TypeVar("_T")


class Translator:
    """Translates with a trained model, or with several together.

    What is compiled is shared by all translators of one model configuration: a new one, for new
    parameters, costs nothing.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        params: Any,
        tokenizers: Tokenizers,
        others: Sequence[tuple[TransformerConfig, Any]] = (),
    ) -> None:
        """Makes a translator.

        Args:
          config: of the run; `model` and `decode` are used.
          params: the model's parameters, nested dicts of arrays.
          tokenizers: of the run.
          others: configuration and parameters of more models, which choose each token together with
            the first. Alignments are those of the first alone.

        Raises:
          UserError: a model has no encoder.
        """
        sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
        self.models = [
            (with_vocabulary_sizes(model, *sizes), jax.device_put(parameters))
            for model, parameters in ((config.model, params), *others)
        ]
        if not all(model.has_inputs for model, _ in self.models):
            raise UserError("model.has_inputs=False: a language model cannot translate")
        self.decode = config.decode
        self.tokenizers = tokenizers
        self._decoders: dict[Any, SentenceDecoder] = {}
        """One for each set of options that was asked for."""

    @classmethod
    def from_run(
        cls, folders: str | Path | Sequence[str | Path], checkpoint: CheckpointSelector = "best"
    ) -> Self:
        """The translator of a run folder, or of several: an ensemble.

        Raises:
          UserError: a folder, or a part of it, is missing or damaged; or their vocabularies differ.
        """
        several = [folders] if isinstance(folders, str | Path) else folders
        return cls.from_runs([load_run(folder, checkpoint) for folder in several])

    @classmethod
    def from_runs(cls, runs: Sequence[TrainedModel], decode: DecodeConfig | None = None) -> Self:
        """The translator of one run, or of several together.

        Args:
          runs: at least one.
          decode: options; by default as configured for the first.

        Raises:
          UserError: their vocabularies differ.
        """
        require_same_vocabularies([(str(run.folder), run) for run in runs])
        first, *others = runs
        config = dataclasses.replace(first.config, decode=decode or first.config.decode)
        pairs = [(run.config.model, run.params) for run in others]
        return cls(config, first.params, first.tokenizers, pairs)

    def translate(
        self,
        sentences: Sequence[str | Sentence],
        beam_size: int | None = None,
        *,
        show_progress: bool = False,
        **options: Any,
    ) -> list[str]:
        """The best translation of each sentence; arguments as in `translate_n_best`."""
        lists = self.translate_n_best(
            sentences, 1, beam_size=beam_size, scores=False, show_progress=show_progress, **options
        )
        return [hypotheses[0].text for hypotheses in lists]

    def translate_n_best(
        self,
        sentences: Sequence[str | Sentence],
        n_best: int | None = None,
        *,
        unit: Unit | None = None,
        attention: bool = False,
        scores: bool = True,
        show_progress: bool = False,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """The best translations of each sentence.

        Args:
          sentences: in any order and of any length.
          n_best: translations per sentence; by default as configured.
          unit: align these.
          attention: give the attention that alignments are made from.
          scores: give scores and log-probabilities; a greedy search is faster without.
          show_progress: draw a progress bar on standard error.
          **options: fields of `DecodeConfig`; those that are left out, or None, are as configured.

        Returns:
          For each sentence, in the order given, its translations from best to worst. They depend on
          the sentence and the options alone, not on the other sentences.

        Raises:
          UserError: an option is out of range or does not fit the model, a sentence cannot have
            what is asked of it, or the parameters are not finite.
        """
        decoder = self._decoder({**options, "n_best": n_best}, unit, attention, scores)
        finished = track(
            decoder.translate(list(map(_as_sentence, sentences))),
            "Translating",
            total=len(sentences),
            console=Console(stderr=True),
            transient=True,
            disable=not show_progress,
        )
        return list(in_order(finished))

    def stream(
        self,
        sentences: Iterable[str | Sentence],
        *,
        unit: Unit | None = None,
        attention: bool = False,
        scores: bool = True,
        advance: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> Iterator[list[Hypothesis]]:
        """The best translations of each sentence, as soon as they and all before are finished.

        Sentences are read in portions of some thousands, the next when all of one are finished:
        memory does not grow with their number. Arguments that are not explained here, and errors,
        are those of `translate_n_best`.

        Args:
          sentences: any number.
          unit: see there.
          attention: see there.
          scores: see there.
          advance: called when a sentence is finished, which may be before its turn.
          **options: see there.
        """
        decoder = self._decoder(options, unit, attention, scores)

        def finished(window: Sequence[Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
            for result in decoder.translate(window):
                advance()
                yield result

        for window in windows(map(_as_sentence, sentences), WINDOW * decoder.decode.batch_tokens):
            yield from in_order(finished(window))

    def _decoder(
        self, options: dict[str, Any], unit: Unit | None, attention: bool, scores: bool
    ) -> SentenceDecoder:
        given = {name: value for name, value in options.items() if value is not None}
        decode = dataclasses.replace(self.decode, **given)
        key = (decode, unit, attention, scores)
        if key not in self._decoders:
            self._decoders[key] = SentenceDecoder(
                self.models, decode, self.tokenizers, unit, attention, scores
            )
        return self._decoders[key]


def windows(sentences: Iterable[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Sentences in their order, as many together as have about `size` characters.

    Each window has at least one sentence, and no more than `size`.
    """
    window: list[Sentence] = []
    room = size
    for sentence in sentences:
        window.append(sentence)
        room -= max(1, len(sentence.text))
        if room <= 0:
            yield window
            window, room = [], size
    if window:
        yield window


def in_order(finished: Iterable[tuple[int, _T]]) -> Iterator[_T]:
    """Results with the indices 0, 1, 2 ... in that order, each as soon as all before it are there.

    Args:
      finished: (index, result) in any order.
    """
    waiting: dict[int, _T] = {}
    following = 0
    for index, result in finished:
        waiting[index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _as_sentence(sentence: str | Sentence) -> Sentence:
    return Sentence(sentence) if isinstance(sentence, str) else sentence
