"""Confidence intervals and paired tests, computed by sacreBLEU."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.metrics import FunctionMetric, MetricOptions, PairedTestKind
from flaxformer_mt.memory_limits import host_memory, require_memory

DEFAULT_RESAMPLES = 1000
"""sacreBLEU's."""

_SEED = "SACREBLEU_SEED"


class MetricScore(NamedTuple):
    """A metric of one system."""

    score: float
    signature: str
    """sacreBLEU's: everything that is needed to compute the score again."""
    mean: float | None = None
    """Of the bootstrap resamples; None without an interval."""
    interval: float | None = None
    """Half the width of the interval that contains 95% of the resamples' scores."""
    p_value: float | None = None
    """Of the difference from the baseline, 1 for equal texts; None for the baseline and without a
    test."""


def score_systems(
    metric: Any, systems: Mapping[str, Sequence[str]], options: MetricOptions
) -> dict[str, MetricScore]:
    """Computes one metric, from `metrics`, of several systems, hypotheses by name."""
    resampled = options.confidence or options.significance is not None
    if not resampled or _has_corpus_scores_only(metric, systems):
        scores = {name: metric.corpus_score(texts, None).score for name, texts in systems.items()}
        signature = str(metric.get_signature())
        return {name: MetricScore(score, signature) for name, score in scores.items()}
    resamples = options.resamples
    if options.significance == "randomization":
        return _paired(metric, systems, "ar", resamples, 0 if options.confidence else -1)
    if options.significance == "bootstrap":
        return _paired(metric, systems, "bs", resamples)
    found: dict[str, MetricScore] = {}
    for name, texts in systems.items():
        if isinstance(metric, FunctionMetric):
            found |= _paired(metric, {name: texts}, "bs", resamples)
        else:
            found[name] = _bootstrapped(metric, texts, resamples or DEFAULT_RESAMPLES)
    return found


def _has_corpus_scores_only(metric: Any, systems: Mapping[str, Sequence[str]]) -> bool:
    return isinstance(metric, FunctionMetric) and any(
        metric.values(texts).ndim == 0 for texts in systems.values()
    )


def _bootstrapped(metric: Metric, hypotheses: Sequence[str], resamples: int) -> MetricScore:
    """Returns the score with its interval.

    The paired test gives the same interval, except that it rounds some numbers to float32.
    """
    score = metric.corpus_score(hypotheses, None, n_bootstrap=resamples)
    return MetricScore(
        score.score, str(metric.get_signature()), float(score._mean), float(score._ci)
    )


def _paired(
    metric: Any,
    systems: Mapping[str, Sequence[str]],
    kind: Literal["bs", "ar"],
    resamples: int,
    confidence: int = -1,
) -> dict[str, MetricScore]:
    """Runs sacreBLEU's paired test; with a single system, it estimates its interval only."""
    test = PairedTest(
        list(systems.items()),
        {"metric": metric},
        references=None,  # The metric has them.
        test_type=kind,
        n_samples=resamples,
        n_ar_confidence=confidence,
    )
    signatures, scores = test()
    ((name, signature),) = signatures.items()
    found = {
        system: _score(result, str(signature))
        for system, result in zip(systems, scores[name], strict=True)
    }
    baseline, *others = systems
    for other in others:
        # sacreBLEU counts the differences above the observed one, of which there are none.
        if list(systems[other]) == list(systems[baseline]):
            found[other] = found[other]._replace(p_value=1.0)
    return found


def _score(result: str | Result, signature: str) -> MetricScore:
    assert isinstance(result, Result)
    mean, interval, p_value = (
        None if value is None else float(value)
        for value in (result.mean, result.ci, result.p_value)
    )
    return MetricScore(float(result.score), signature, mean, interval, p_value)


def check_resampling(options: MetricOptions, sentences: int) -> None:
    """Raises UserError if what intervals and tests depend on besides the texts cannot be used.

    This includes the environment variable SACREBLEU_SEED and the memory for the resamples.
    """
    resamples, kinds = options.resamples, get_args(PairedTestKind)
    if options.significance not in (None, *kinds):
        names = " or ".join(kinds)
        raise UserError(f"significance={options.significance!r}: choose {names}, or None")
    if not isinstance(resamples, int):
        raise TypeError(f"resamples must be a number, not {type(resamples).__name__}")
    if resamples < 0 or resamples == 1:  # sacreBLEU does not resample once.
        raise UserError(f"resamples={resamples}: give 2 or more, or 0 for sacreBLEU's default")
    seed = os.environ.get(_SEED, "none")
    if seed.lower() != "none" and not seed.isdecimal():
        raise UserError(f"{_SEED}={seed}: must be a whole number, or none for another each time")
    count = resamples or DEFAULT_RESAMPLES
    what = f"{count:,} resamples of {sentences:,} sentences take"
    require_memory(16 * sentences * count, host_memory(), what)
