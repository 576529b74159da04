"""Translation quality: BLEU, chrF, chrF++ and TER by sacreBLEU, and metrics of the user's.

Source: Post 2018, "A Call for Clarity in Reporting BLEU Scores".
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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
    "MetricScore",
    "PairedTestKind",
    "check_options",
    "compare",
    "evaluate",
    "flattened",
]


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None = None,
    standard: Iterable[str] = STANDARD,
    metrics: Mapping[str, MetricFunction] | None = None,
    tokenize: str = DEFAULT_TOKENIZER,
    lowercase: bool = False,
    confidence: bool = False,
    resamples: int = 0,
) -> dict[str, Any]:
    """Computes metrics of detokenized translations.

    By default they are those of sacreBLEU with its default settings: cased, except for TER.

    Args:
      hypotheses: N translations.
      references: N references; or several lists of N references, one list for each set of them.
      sources: the N source sentences, for `metrics` that need them.
      standard: which of "bleu", "chrf", "chrf++" and "ter" to compute. TER takes longest.
      metrics: functions by name that are computed, too: each is called with the sources, the
        translations and a list of lists of references, and returns the score of the corpus or one
        score per sentence, whose mean is taken. See `MetricFunction`.
      tokenize: sacreBLEU's name of BLEU's tokenizer: 13a, intl, zh, ja-mecab, ko-mecab, char, ...
      lowercase: whether BLEU, chrF and chrF++ ignore case.
      confidence: whether to estimate 95% confidence intervals by bootstrap resampling. Scores of
        whole corpora have none. The seed is that of sacreBLEU, SACREBLEU_SEED or 12345.
      resamples: number of resamples, at least 2; 0 = sacreBLEU's default, 1,000.

    Returns:
      For each metric, by its name: the score (of sacreBLEU's metrics, in percent);
      `<name>_signature`; and with `confidence` `<name>_mean`, the mean of the resamples, and
      `<name>_interval`, half the width of the interval around it.

    Raises:
      TypeError: texts are not lists of strings, or a function does not return numbers.
      UserError: the numbers of sentences differ, or there are none; a metric or tokenizer is
        unknown or cannot be used.
    """
    name = "hypotheses"
    scores = compare(
        {name: hypotheses},
        references,
        sources=sources,
        standard=standard,
        metrics=metrics,
        tokenize=tokenize,
        lowercase=lowercase,
        confidence=confidence,
        resamples=resamples,
    )
    return flattened(scores[name])


def compare(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str] | Sequence[Sequence[str]],
    *,
    sources: Sequence[str] | None = None,
    standard: Iterable[str] = STANDARD,
    metrics: Mapping[str, MetricFunction] | None = None,
    tokenize: str = DEFAULT_TOKENIZER,
    lowercase: bool = False,
    confidence: bool = False,
    significance: PairedTestKind | None = None,
    resamples: int = 0,
) -> dict[str, dict[str, MetricScore]]:
    """Computes metrics of several systems, and whether they differ from the first.

    Args:
      systems: N translations by the name of the system. The first is the baseline of a test.
      references: see `evaluate`, also for the other arguments.
      sources: the N source sentences.
      standard: metrics of sacreBLEU.
      metrics: functions by name.
      tokenize: BLEU's tokenizer.
      lowercase: whether BLEU, chrF and chrF++ ignore case.
      confidence: whether to estimate confidence intervals. A paired bootstrap always does.
      significance: "bootstrap" (Koehn 2004) or "randomization" (Riezler and Maxwell 2005): the
        paired test that compares each other system with the baseline; None = no test.
      resamples: number of resamples, or of trials of the randomization; 0 = sacreBLEU's defaults,
        1,000 and 10,000. The intervals beside a randomization have 1,000 resamples.

    Returns:
      {system: {metric: score}}. sacreBLEU's own programs compute the same numbers, except that
      the p-value of a text equal to the baseline is 1 here.

    Raises:
      TypeError: see `evaluate`.
      UserError: see `evaluate`; or there is no system, the test is unknown, the resamples are too
        few or too many, or the environment variable SACREBLEU_SEED is not a number.
    """
    if not isinstance(systems, Mapping):
        raise TypeError(f"systems must be texts by name, not {type(systems).__name__}")
    texts = {name: require_texts(given, name) for name, given in systems.items()}
    all_references = reference_lists(references)
    if sources is not None:
        sources = require_texts(sources, "sources")
    _check_counts(texts, all_references, sources)
    functions, standard = dict(metrics or {}), require_texts(standard, "standard")
    check_options(
        standard,
        tokenize,
        functions,
        confidence=confidence,
        significance=significance,
        resamples=resamples,
        sentences=len(all_references[0]),
    )
    all_metrics: dict[str, Any] = {
        name: sacrebleu_metric(name, all_references, tokenize, lowercase) for name in standard
    }
    for name, function in functions.items():
        all_metrics[name] = FunctionMetric(name, function, sources, all_references)
    by_metric = {
        name: score_systems(metric, texts, confidence, significance, resamples)
        for name, metric in all_metrics.items()
    }
    return {
        system: {name: scores[system] for name, scores in by_metric.items()} for system in texts
    }


def check_options(
    standard: Iterable[str],
    tokenize: str,
    functions: Collection[str] = (),
    *,
    confidence: bool = False,
    significance: PairedTestKind | None = None,
    resamples: int = 0,
    sentences: int = 1,
) -> None:
    """Raises the errors of options that are unknown or cannot be used.

    For programs that compute something expensive before they evaluate it. Arguments are those of
    `compare`, with the names of its functions and the number of sentences.
    """
    for name in standard:
        sacrebleu_metric(name, [], tokenize, lowercase=False)
    for name in functions:
        if name in STANDARD:
            raise UserError(f"the metric {name} is sacreBLEU's: give the function another name")
    if confidence or significance is not None or resamples:
        check_resampling(significance, resamples, sentences)


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
