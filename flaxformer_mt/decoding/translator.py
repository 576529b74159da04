"""Translation of text: the public interface of a trained model."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import jax
from rich.console import Console
from rich.progress import track

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.config.decode import DecodeOptions
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers, split_language
from flaxformer_mt.decoding.batching.workers import batch_tokens, decoding_devices
from flaxformer_mt.decoding.parameters import prepared_models
from flaxformer_mt.decoding.scoring.alignment import AlignmentUnit
from flaxformer_mt.decoding.sentence_decoder import Hypothesis, Sentence, SentenceDecoder
from flaxformer_mt.decoding.text_arguments import (
    require_iterable,
    require_path,
    require_text,
    require_texts,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.layout import CheckpointSelector
from flaxformer_mt.trained_model import TrainedModel, load_run

_WINDOW_CHARACTERS = 128

_T = TypeVar("_T")


class Translator:
    """Translates text with a trained model, or with an ensemble of several.

    All translators of one model configuration share their compiled programs: another one, for other
    parameters, compiles nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        tokenizers: Tokenizers,
        decode: DecodeConfig | None = None,
        *,
        others: Sequence[tuple[TransformerConfig, Any]] = (),
    ) -> None:
        """Creates a translator.

        Args:
          config: the model.
          params: its parameters, nested dicts of arrays on the host, on one device or on several.
            Arrays on the first device are not copied: do not donate them while translating. They
            are decoded with on one device, or sharded (`decode.devices_per_model`).
          tokenizers: its vocabularies, which also give sizes that are 0 in `config`.
          decode: the search options; None = the defaults of `DecodeConfig`.
          others: configuration and parameters of the other models of an ensemble. Alignments are
            computed with the first model.

        Raises:
          UserError: a model has no encoder, or `params` are not the parameters of the model.
        """
        # Searches with other options share the models.
        self.decode = decode or DecodeConfig()
        self.models = prepared_models([(config, params), *others], tokenizers, self.decode)
        self.tokenizers = tokenizers
        self._decoders: dict[Any, SentenceDecoder] = {}
        """One per set of options."""

    @classmethod
    def from_run(
        cls, folders: str | Path | Sequence[str | Path], checkpoint: CheckpointSelector = "best"
    ) -> Self:
        """Loads the model of a run folder, or those of several folders as an ensemble.

        Raises:
          UserError: a folder, or a part of it, is missing or damaged, or the vocabularies differ.
        """
        if isinstance(folders, str | Path):
            folders = [folders]
        listed = require_iterable(folders, "folders", "paths")
        paths = [require_path(folder, "a run folder") for folder in listed]
        return cls.from_runs([load_run(path, checkpoint) for path in paths])

    @classmethod
    def from_runs(cls, runs: Sequence[TrainedModel], decode: DecodeConfig | None = None) -> Self:
        """Creates a translator from one run, or from several as an ensemble.

        The default of `decode` is that of the first run.

        Raises:
          UserError: the vocabularies of the runs differ, or parameters are not those of the model.
        """
        if not runs:
            raise UserError("there is no run to translate with: name at least one")
        require_same_vocabularies([(str(run.folder), run) for run in runs])
        first, *others = runs
        return cls(
            first.config.model,
            first.params,
            first.tokenizers,
            decode or first.config.decode,
            others=[(run.config.model, run.params) for run in others],
        )

    @overload
    def translate(  # type: ignore[overload-overlap]
        self,
        sentences: str | Sentence,
        beam_size: int | None = None,
        *,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> str: ...

    @overload
    def translate(
        self,
        sentences: Iterable[str | Sentence],
        beam_size: int | None = None,
        *,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> list[str]: ...

    def translate(
        self,
        sentences: str | Sentence | Iterable[str | Sentence],
        beam_size: int | None = None,
        *,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> str | list[str]:
        """Returns the best translation of a sentence, or of each sentence of a list.

        Options and errors are those of `translate_n_best`.
        """
        if "n_best" in options:
            raise TypeError("n_best: translate returns the best translation; use translate_n_best")
        given = _as_sentences(sentences)
        lists = self.translate_n_best(
            given, 1, beam_size=beam_size, scores=False, show_progress=show_progress, **options
        )
        texts = [hypotheses[0].text for hypotheses in lists]
        return texts[0] if isinstance(sentences, str | Sentence) else texts

    @overload
    def translate_n_best(  # type: ignore[overload-overlap]
        self,
        sentences: str | Sentence,
        n_best: int | None = None,
        *,
        beam_size: int | None = None,
        unit: AlignmentUnit | None = None,
        attention: bool = False,
        scores: bool = True,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> list[Hypothesis]: ...

    @overload
    def translate_n_best(
        self,
        sentences: Iterable[str | Sentence],
        n_best: int | None = None,
        *,
        beam_size: int | None = None,
        unit: AlignmentUnit | None = None,
        attention: bool = False,
        scores: bool = True,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> list[list[Hypothesis]]: ...

    def translate_n_best(
        self,
        sentences: str | Sentence | Iterable[str | Sentence],
        n_best: int | None = None,
        *,
        beam_size: int | None = None,
        unit: AlignmentUnit | None = None,
        attention: bool = False,
        scores: bool = True,
        show_progress: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> list[Hypothesis] | list[list[Hypothesis]]:
        """Returns the best translations of a sentence, or of each sentence of a list.

        Args:
          sentences: a sentence, or an iterable of sentences in any order and of any length.
          n_best: number of translations per sentence; fewer if there are not so many.
          beam_size: number of hypotheses; None = as configured.
          unit: the unit to align; None = no alignment.
          attention: whether to return the attention from which alignments are computed.
          scores: whether to return scores and log-probabilities; greedy search is faster without.
          show_progress: whether to show a progress bar on standard error.
          **options: fields of `DecodeConfig`; those omitted, or None, are as configured.

        Returns:
          For each sentence, in the order given, its translations from best to worst; for a sentence
          that is not in a list, its translations. They do not depend on the other sentences.

        Raises:
          TypeError: `sentences` or an option are of another type, or there is no such option.
          UserError: an option is out of range or does not fit the model, the constraints of a
            sentence cannot be met, or the parameters are not finite.
        """
        given = _as_sentences(sentences)
        decoder = self._decoder(
            {**options, "beam_size": beam_size, "n_best": n_best}, unit, attention, scores
        )
        finished = track(
            decoder.translate(given),
            "Translating",
            total=len(given),
            console=Console(stderr=True),
            transient=True,
            disable=not show_progress,
        )
        lists = list(in_order(finished))
        return lists[0] if isinstance(sentences, str | Sentence) else lists

    def stream(
        self,
        sentences: Iterable[str | Sentence],
        *,
        n_best: int | None = None,
        beam_size: int | None = None,
        unit: AlignmentUnit | None = None,
        attention: bool = False,
        scores: bool = True,
        advance: Callable[[], object] = lambda: None,
        **options: Unpack[DecodeOptions],
    ) -> Iterator[list[Hypothesis]]:
        """Yields the best translations of each sentence, in the order of the sentences.

        Sentences are read in windows of a few thousand, each when the previous one is finished, so
        that memory does not grow with their number. The translations of a sentence are yielded as
        soon as those of all preceding ones are. `advance` is called when a sentence is finished,
        possibly earlier; other arguments and errors are those of `translate_n_best`.
        """
        given = _checked(sentences)
        chosen = {**options, "beam_size": beam_size, "n_best": n_best}
        decoder = self._decoder(chosen, unit, attention, scores)

        def finished(window: Sequence[Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
            for result in decoder.translate(window):
                advance()
                yield result

        grouped = windows(given, window_characters(decoder.decode))
        return itertools.chain.from_iterable(in_order(finished(window)) for window in grouped)

    def _decoder(
        self, options: Mapping[str, Any], unit: AlignmentUnit | None, attention: bool, scores: bool
    ) -> SentenceDecoder:
        decode = with_options(self.decode, options)
        key = (decode, unit, attention, scores)
        if key not in self._decoders:
            self._decoders[key] = SentenceDecoder(
                self.models, decode, self.tokenizers, unit, attention, scores
            )
        return self._decoders[key]


def require_same_vocabularies(runs: Sequence[tuple[str, TrainedModel]]) -> None:
    """Raises UserError if vocabularies, special tokens or numbers of logits of two runs differ."""
    first_folder, first = runs[0]
    for folder, run in runs[1:]:
        for side in ("source", "target"):
            fingerprints = {getattr(r.tokenizers, side).fingerprint for r in (first, run)}
            if len(fingerprints) > 1:
                raise UserError(
                    f"{first_folder} and {folder} cannot form an ensemble: their {side} "
                    "vocabularies differ; train one with data.tokenizer_path set to the other"
                )
        for name in ("pad_id", "bos_id", "eos_id", "target_vocab_size"):
            ours, theirs = (getattr(r.model, name) for r in (first, run))
            if ours != theirs:
                raise UserError(
                    f"{first_folder} and {folder} cannot form an ensemble: model.{name} is "
                    f"{ours} in one and {theirs} in the other"
                )


def with_options(decode: DecodeConfig, options: Mapping[str, Any]) -> DecodeConfig:
    """Returns the configuration with other search options; None leaves an option as it is.

    An option that does not exist, or a value of another type, is a TypeError.
    """
    names = [field.name for field in dataclasses.fields(decode)]
    for name in options:
        if name not in names:
            raise TypeError(f"there is no search option {name}{suggestion(name, names)}")
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(decode, **given)


def translate(
    config: TransformerConfig,
    params: Any,
    tokenizers: Tokenizers,
    sentences: Iterable[str | Sentence],
    beam_size: int | None = None,
    **options: Unpack[DecodeOptions],
) -> list[str]:
    """Returns the best translation of each sentence.

    For translations during training. Another call with the same configuration, search options and
    row lengths compiles nothing, also with other parameters. `Translator`, which has the same
    arguments, keeps parameters between calls, and returns scores, alignments and several
    translations. Sharded parameters are gathered on one device if they leave half of its memory,
    and stay sharded otherwise (`devices_per_model`): if processes share them, all must make the
    call, with the same sentences.

    >>> translate(config, params, tokenizers, ["three small dogs"], beam_size=1)
    ['drei kleine Hunde']

    Raises:
      TypeError: an argument has another type, or there is no such search option.
      UserError: `params` are not the parameters of the model or not finite, an option is out of
        range or does not fit the model, or the constraints of a sentence cannot be met.
    """
    given = list(_checked(sentences))
    decode = DecodeConfig(devices_per_model=options.get("devices_per_model") or 0)
    return Translator(config, params, tokenizers, decode).translate(given, beam_size, **options)


def window_characters(decode: DecodeConfig) -> int:
    """Returns how many characters are read ahead: enough for about thirty batches per device.

    Raises:
      UserError: this process has fewer than `decode.num_devices`.
    """
    devices = decoding_devices(decode, jax.local_devices()[0])
    return _WINDOW_CHARACTERS * batch_tokens(decode, devices[0].platform) * len(devices)


def windows(sentences: Iterable[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Groups sentences into windows of about `size` characters; an empty one counts as one."""
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
    """Yields the results of (index, result) pairs by index, each as early as possible."""
    waiting: dict[int, _T] = {}
    following = 0
    for index, result in finished:
        waiting[index] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _as_sentences(sentences: str | Sentence | Iterable[str | Sentence]) -> list[Sentence]:
    return list(_checked([sentences] if isinstance(sentences, str | Sentence) else sentences))


def _checked(sentences: Iterable[str | Sentence]) -> Iterator[Sentence]:
    """Yields the sentences, each after a check of its type when it is read."""
    if isinstance(sentences, Sentence):  # A tuple of its fields.
        raise TypeError("sentences must be a list of strings or Sentence, not a single Sentence")
    numbered = enumerate(require_iterable(sentences, "sentences", "strings or Sentence"))
    return (_as_sentence(sentence, f"sentences[{index}]") for index, sentence in numbered)


def _as_sentence(sentence: Any, name: str) -> Sentence:
    if not isinstance(sentence, Sentence):
        return Sentence(require_text(sentence, name))
    return Sentence(
        require_text(sentence.text, f"{name}.text"),
        require_text(sentence.prefix, f"{name}.prefix"),
        tuple(require_texts(sentence.phrases, f"{name}.phrases")),
    )


def check_search(model: TransformerConfig, tokenizers: Tokenizers, decode: DecodeConfig) -> None:
    """Raises the errors of a validation's search, which would otherwise come after many steps."""
    SentenceDecoder([(tokenizers.with_sizes(model), {})], decode, tokenizers)


def into_languages(
    sources: Sequence[str], references: Sequence[Sequence[str]], target: Tokenizer
) -> tuple[list[Sentence], list[list[str]]]:
    """Returns sentences to translate into the languages of their references.

    In multilingual vocabularies (NLLB, M2M-100, mBART-50) references may begin with a language;
    that of the first of several lists is used. The references are returned without it.
    """
    divided = [[split_language(text, target) for text in each] for each in references]
    sentences = [
        Sentence(source, prefix=language)
        for source, (language, _) in zip(sources, divided[0], strict=True)
    ]
    return sentences, [[text for _, text in each] for each in divided]
