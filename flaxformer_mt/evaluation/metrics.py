"""The metrics: those of sacreBLEU, and user-defined functions."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Score, Signature

from flaxformer_mt import writing_systems
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError, UserTypeError

STANDARD = ("bleu", "chrf", "chrf++", "ter")
"""The metrics of sacreBLEU, in the order of tables."""

DEFAULT_TOKENIZER = "13a"
"""sacreBLEU's, for languages that separate words by spaces."""

_NEED_SPACES = DEFAULT_TOKENIZER, "intl", "none"
_SPACELESS_SHARE = 0.3  # Of the sentences, with which a corpus is tokenized as one without spaces.
_MIXED = 0.1  # The share of the fewer sentences above which a corpus is of both kinds.
_HAN_FOR_BLEU = 0.9  # Share of Chinese characters from which `zh` separates everything.
_HAN_FOR_TER = 0.2  # Japanese has about 0.4; TER's own tokenizer separates kana from them only.


@dataclasses.dataclass(frozen=True)
class Separation:
    """How sacreBLEU can separate the words of a text, by the scripts that it is in."""

    bleu: str = DEFAULT_TOKENIZER
    """A tokenizer of BLEU. Those that need further packages, such as ja-mecab, are not chosen:
    metrics should not depend on what is installed."""
    ter: Literal["spaces", "asian", "characters"] = "spaces"
    """What TER edits: words; sacreBLEU's "asian" words, which are Chinese characters and what is
    between them; or characters of all scripts without spaces."""
    has_spaces: bool = True
    """Whether spaces separate the words, as in text that is segmented."""
    spaceless: float = 0.0
    """Share of the sentences that are in a script without spaces."""

    @property
    def is_mixed(self) -> bool:
        """Whether no tokenizer separates the words of all sentences."""
        return _MIXED < self.spaceless < 1 - _MIXED

    def is_unsuitable(self, tokenize: str) -> bool:
        """Returns whether a tokenizer of BLEU evidently does not separate the words."""
        needs_spaces = tokenize in _NEED_SPACES or (tokenize == "zh" and self.ter == "characters")
        return needs_spaces and not self.has_spaces


def separation_of(texts: Sequence[str]) -> Separation:
    """Returns how the words of sentences can be separated.

    The text decides, and not the code of its language, which is spelled in many ways ("ja", "jp",
    "zh.tok").
    """
    sentences = [
        text for text in writing_systems.evenly_spaced(texts) if any(map(str.isalpha, text))
    ]
    spaceless = [text for text in sentences if writing_systems.is_spaceless(text)]
    of_all = len(spaceless) / max(len(sentences), 1)
    if of_all <= _SPACELESS_SHARE:
        return Separation(spaceless=of_all)
    share = writing_systems.han_share(spaceless)
    return Separation(
        bleu="zh" if share >= _HAN_FOR_BLEU else "char",
        ter="asian" if share >= _HAN_FOR_TER else "characters",
        has_spaces=2 * sum(map(writing_systems.is_unsegmented, spaceless)) <= len(spaceless),
        spaceless=of_all,
    )


_WRONG_FOR_ZH = re.compile(
    f"\u2026|(?![\u2e80-\u2fdf\u3000-\u303f\u3400-\u4db5\u4e00-\u9fbb\uf900-\ufad9])[{writing_systems.HAN}]"
)


def wrong_for_zh(texts: Sequence[str]) -> int:
    """Returns how many texts have characters that sacreBLEU's tokenizer zh treats wrongly.

    It takes "\u2026" for a Chinese character, and does not separate those of extension B and other
    rare ones (issue 298 of sacreBLEU).
    """
    return sum(map(bool, map(_WRONG_FOR_ZH.search, texts)))


MetricFunction = Callable[
    [Sequence[str] | None, Sequence[str], Sequence[Sequence[str]]],
    float | Sequence[float] | np.ndarray,
]
"""(sources, hypotheses, references) -> the score of the corpus, or one score per sentence.

`sources` is None if they are not known. `references[k][i]` is the k-th reference of sentence i."""

PairedTestKind = Literal["bootstrap", "randomization"]
"""Paired bootstrap resampling (Koehn 2004), or paired approximate randomization (Riezler and
Maxwell 2005)."""


@dataclasses.dataclass(frozen=True)
class MetricOptions:
    """Which metrics to compute, and how certain they are."""

    sources: Sequence[str] | None = None
    """The N source sentences, for `metrics` that need them."""
    standard: Iterable[str] = STANDARD
    """Which of "bleu", "chrf", "chrf++" and "ter" to compute. TER takes longest."""
    metrics: Mapping[str, MetricFunction] | None = None
    """Functions by name that are also computed."""
    tokenize: str | None = None
    """sacreBLEU's name of BLEU's tokenizer: 13a, intl, zh, ja-mecab, ko-mecab, char, ...

    None = 13a, or zh or char if the references are in a script without spaces."""
    lowercase: bool = False
    """Whether BLEU, chrF and chrF++ ignore case."""
    confidence: bool = False
    """Whether to estimate 95% confidence intervals by bootstrap resampling. Scores of whole corpora
    have none. The seed is that of sacreBLEU, SACREBLEU_SEED or 12345."""
    resamples: int = 0
    """Number of resamples, at least 2, or of trials of the randomization; 0 = sacreBLEU's defaults,
    1,000 and 10,000. The intervals beside a randomization have 1,000 resamples."""
    significance: PairedTestKind | None = None
    """The paired test that compares each other system with the first. A bootstrap also estimates
    confidence intervals."""


def sacrebleu_metric(
    name: str,
    references: Sequence[Sequence[str]],
    separation: Separation,
    lowercase: bool,
) -> Any:
    """Returns a metric of sacreBLEU that has prepared the references, [per sentence][sentences].

    `lowercase` is for all but TER, which always ignores case.

    Raises:
      UserError: the metric or the tokenizer is unknown, or what the tokenizer needs is missing.
    """
    if name == "bleu":
        return _bleu(references, separation.bleu, lowercase)
    if name in ("chrf", "chrf++"):
        word_order = 2 if name == "chrf++" else 0
        return CHRF(word_order=word_order, lowercase=lowercase, references=references)
    if name == "ter":
        has_words = separation.ter == "spaces"
        kind = _CharacterTER if separation.ter == "characters" else TER
        return kind(normalized=not has_words, asian_support=not has_words, references=references)
    hint = suggestion(name, STANDARD) or f"; known: {', '.join(STANDARD)}"
    raise UserError(f"unknown metric {name!r}{hint}")


def _bleu(references: Sequence[Sequence[str]], tokenize: str, lowercase: bool) -> BLEU:
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(
            f"unknown tokenizer {tokenize!r}; sacreBLEU has {', '.join(BLEU.TOKENIZERS)}"
        )
    try:
        return BLEU(tokenize=tokenize, lowercase=lowercase, references=references)
    except (RuntimeError, ImportError) as error:  # A package is missing.
        reason = " ".join(str(error).split())
        raise UserError(f"the tokenizer {tokenize} cannot be used: {reason}") from error
    except OSError as error:  # Some tokenizers fetch their vocabulary when they are first used.
        raise UserError(
            f"the tokenizer {tokenize} cannot be used: its vocabulary could not be fetched: {error}"
        ) from error


class _CharacterTER(TER):
    """TER whose words are the characters of scripts without spaces, and the words of others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokenizer_signature += "-char"

    def _preprocess_segment(self, sentence: str) -> str:
        return super()._preprocess_segment(writing_systems.separated(sentence))


class FunctionMetric:
    """A user-defined function, with the methods by which sacreBLEU resamples its metrics.

    The function is called once per system.
    """

    def __init__(
        self,
        name: str,
        function: MetricFunction,
        sources: Sequence[str] | None,
        references: Sequence[Sequence[str]],
    ) -> None:
        self.name = name
        self._function = function
        self._sources = sources
        self._references = references
        self._values: dict[tuple[str, ...], np.ndarray] = {}

    def values(self, hypotheses: Sequence[str]) -> np.ndarray:
        """Returns the function's result: float64 [] or, if it scores sentences, [N].

        Raises:
          TypeError: it is neither a number nor a number for each sentence.
          UserError: a number is not finite.
        """
        key = tuple(hypotheses)
        if key not in self._values:
            result = self._function(self._sources, hypotheses, self._references)
            self._values[key] = self._checked(result, len(key))
        return self._values[key]

    def _checked(self, result: Any, count: int) -> np.ndarray:
        try:
            values = np.asarray(result, np.float64)
        except (TypeError, ValueError):
            values = np.empty((0, 0))
        if values.shape not in ((), (count,)):
            kind = type(result).__name__
            size = f" of length {len(result)}" if isinstance(result, Sequence) else ""
            raise UserTypeError(
                f"the metric {self.name} must return a number or one for each of the {count} "
                f"sentences, not {kind}{size}"
            )
        if not np.isfinite(values).all():
            raise UserError(f"the metric {self.name} returned a number that is not finite")
        return values

    def corpus_score(self, hypotheses: Sequence[str], references: None) -> Score:
        """Returns the score of a system: the number, or the mean of those of its sentences."""
        return Score(self.name, float(self.values(hypotheses).mean()))

    def get_signature(self) -> Signature:
        """Returns a signature that names the function, or has the `identity` of its object."""
        signature = Signature({"num_refs": len(self._references)})
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        owner = getattr(self._function, "__self__", None)
        known = {"function": f"{self._function.__module__}.{name}"}
        for key, value in getattr(owner, "identity", known).items():
            signature.update(key, value)
        signature.update("version", None)  # sacreBLEU's.
        return signature

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: None
    ) -> list[list[float]]:
        return [[value, 1.0] for value in self.values(hypotheses)]

    def _aggregate_and_compute(self, statistics: Any) -> Score:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def _compute_score_from_stats(self, statistics: Any) -> Score:
        total, count = statistics
        return Score(self.name, float(total / count))
