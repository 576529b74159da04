"""Translation quality: BLEU, chrF, chrF++ and TER by sacreBLEU, and user-defined metrics.

Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.decoding.text_arguments import require_iterable, require_texts
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.metrics import (
    DEFAULT_TOKENIZER,
    STANDARD,
    FunctionMetric,
    MetricFunction,
    sacrebleu_metric,
)
from flaxformer_mt.evaluation.significance import (
    MetricScore,
    PairedTestKind,
    check_resampling,
    score_systems,
)

__all__ = [
    "DEFAULT_TOKENIZER",
    "STANDARD",
    "MetricFunction",
    "MetricOptions",
    "MetricScore",
    "PairedTestKind",
    "check_options",
    "compare",
    "evaluate",
    "flattened",
]


class MetricOptions(TypedDict, total=False):
    """Options of `evaluate` and `compare`, which describe them."""

    sources: Sequence[str] | None
    standard: Iterable[str]
    metrics: Mapping[str, MetricFunction] | None
    tokenize: str
    lowercase: bool
    confidence: bool
    resamples: int


_DEFAULTS: MetricOptions = {
    "sources": None,
    "standard": STANDARD,
    "metrics": None,
    "tokenize": DEFAULT_TOKENIZER,
    "lowercase": False,
    "confidence": False,
    "resamples": 0,
}


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    **options: Unpack[MetricOptions],
) -> dict[str, Any]:
    """Computes metrics of detokenized translations.

    By default they are those of sacreBLEU with its default settings: cased, except for TER.

    Args:
      hypotheses: N translations.
      references: N references; or several lists of N references, one list for each set of them.
      **options:

        - sources: the N source sentences, for `metrics` that need them.
        - standard: which of "bleu", "chrf", "chrf++" and "ter" to compute; by default all. TER
          takes longest.
        - metrics: functions by name that are also computed, see `MetricFunction`.
        - tokenize: sacreBLEU's name of BLEU's tokenizer: 13a (the default), intl, zh, ja-mecab,
          ko-mecab, char, ...
        - lowercase: whether BLEU, chrF and chrF++ ignore case.
        - confidence: whether to estimate 95% confidence intervals by bootstrap resampling. Scores
          of whole corpora have none. The seed is that of sacreBLEU, SACREBLEU_SEED or 12345.
        - resamples: number of resamples, at least 2; 0 = sacreBLEU's default, 1,000.

    Returns:
      For each metric, by its name: the score (of sacreBLEU's metrics, in percent);
      `<name>_signature`; and with `confidence` `<name>_mean`, the mean of the resamples, and
      `<name>_interval`, half the width of the interval around it.

    Raises:
      TypeError: texts are not lists of strings, or a function does not return numbers.
      UserError: the numbers of sentences differ, or there are none; a metric or tokenizer is
        unknown or cannot be used.
    """
    return flattened(compare({"hypotheses": hypotheses}, references, **options)["hypotheses"])


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    significance: PairedTestKind | None = None,
    **options: Unpack[MetricOptions],
) -> dict[str, dict[str, MetricScore]]:
    """Computes metrics of several systems, and whether they differ from the first.

    Args:
      systems: N translations by the name of the system. The first is the baseline of a test.
      references: as of `evaluate`.
      significance: "bootstrap" (Koehn 2004) or "randomization" (Riezler and Maxwell 2005): the
        paired test that compares each other system with the baseline; None = no test. A bootstrap
        also estimates confidence intervals.
      **options: as of `evaluate`. `resamples` is also the number of trials of the randomization,
        by default 10,000; the intervals beside it have 1,000 resamples.

    Returns:
      {system: {metric: score}}. sacreBLEU's own programs compute the same numbers, except that
      the p-value of a text equal to the baseline is 1 here.

    Raises:
      TypeError, UserError: as of `evaluate`; or there is no system, the test is unknown, the
        resamples are too few or too many, or the environment variable SACREBLEU_SEED is not a
        number.
    """
    if not isinstance(systems, Mapping):
        raise TypeError(f"systems must be texts by name, not {type(systems).__name__}")
    texts = {name: require_texts(given, name) for name, given in systems.items()}
    all_references = reference_lists(references)
    given = _with_defaults(options)
    sources, functions = given["sources"], given["metrics"] or {}
    if sources is not None:
        sources = require_texts(sources, "sources")
    _check_counts(texts, all_references, sources)
    # An iterator can be read once.
    given["standard"] = standard = require_texts(given["standard"], "standard")
    check_options(len(all_references[0]), significance=significance, **given)
    tokenize, lowercase = given["tokenize"], given["lowercase"]
    all_metrics: dict[str, Any] = {
        name: sacrebleu_metric(name, all_references, tokenize, lowercase) for name in standard
    }
    for name, function in functions.items():
        all_metrics[name] = FunctionMetric(name, function, sources, all_references)
    confidence, resamples = given["confidence"], given["resamples"]
    by_metric = {
        name: score_systems(metric, texts, confidence, significance, resamples)
        for name, metric in all_metrics.items()
    }
    return {
        system: {name: scores[system] for name, scores in by_metric.items()} for system in texts
    }


def check_options(
    sentences: int,
    *,
    significance: PairedTestKind | None = None,
    **options: Unpack[MetricOptions],
) -> None:
    """Raises the errors of options of `compare` that are unknown or cannot be used.

    For programs that compute something expensive before they evaluate it.

    Args:
      sentences: their number.
      significance: as of `compare`.
      **options: as of `compare`.
    """
    given = _with_defaults(options)
    for name in given["standard"]:
        sacrebleu_metric(name, [], given["tokenize"], lowercase=False)
    for name in given["metrics"] or {}:
        if name in STANDARD:
            raise UserError(f"the metric {name} is sacreBLEU's: give the function another name")
    if given["confidence"] or significance is not None or given["resamples"]:
        check_resampling(significance, given["resamples"], sentences)


def _with_defaults(options: MetricOptions) -> MetricOptions:
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"there is no option {name}{suggestion(name, _DEFAULTS)}")
    return {**_DEFAULTS, **options}


def flattened(scores: Mapping[str, MetricScore]) -> dict[str, Any]:
    """Returns the numbers and signatures of a system as one dict, without those that are None."""
    result: dict[str, Any] = {}
    for name, metric in scores.items():
        values = {
            name: metric.score,
            f"{name}_mean": metric.mean,
            f"{name}_interval": metric.interval,
            f"{name}_p_value": metric.p_value,
            f"{name}_signature": metric.signature,
        }
        result |= {key: value for key, value in values.items() if value is not None}
    return result


def reference_lists(references: Any) -> list[list[str]]:
    """Returns one reference per sentence, or several lists of them, as a list of lists.

    Raises:
      TypeError: they are neither.
    """
    listed = list(require_iterable(references, "references", "strings"))
    if all(isinstance(each, str) for each in listed):
        return [require_texts(listed, "references")]
    return [require_texts(each, f"references[{index}]") for index, each in enumerate(listed)]


def _check_counts(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    sources: Sequence[str] | None,
) -> None:
    if not systems:
        raise UserError("there are no translations to evaluate")
    (name, first), *others = systems.items()
    counts = [(len(each), f"translations of {other}") for other, each in others]
    counts += [(len(each), "references") for each in references]
    counts += [(len(sources), "sources")] if sources is not None else []
    for count, what in counts:
        if count != len(first):
            raise UserError(f"{name}: {len(first)} translations, but {count} {what}")
    if not first:
        raise UserError("there are no sentences to evaluate")
