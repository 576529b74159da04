"""Which checkpoints of a run are kept: ranking by a validation metric."""

import math
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import ValidationMetric

_LOWER_IS_BETTER = {"loss", "cross_entropy", "perplexity"}


def ranking_score(metric: ValidationMetric, metrics: Mapping[str, Any]) -> float:
    """Returns the score of a validation by one of its metrics; higher is better.

    It is the metric, negated if lower is better; -inf if it is missing or not finite.
    """
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if metric in _LOWER_IS_BETTER else value


def metric_of(metric: ValidationMetric, score: float) -> float:
    """Returns the metric of a finite `ranking_score`."""
    return -score if metric in _LOWER_IS_BETTER else score


def validated_steps(scores: Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite score, best first; of equal ones the earlier first."""
    finite = (step for step in scores if math.isfinite(scores[step]))
    return sorted(finite, key=lambda step: (-scores[step], step))


def best_step(scores: Mapping[int, float]) -> int | None:
    """Returns the best step, the newest if none was validated; None if there is none."""
    return next(iter(validated_steps(scores)), max(scores, default=None))


def kept_steps(scores: Mapping[int, float], keep_last: int, keep_best: int) -> set[int]:
    """Returns the steps to keep: the newest, and the best by their ranking scores."""
    return {*sorted(scores)[-keep_last:], *validated_steps(scores)[:keep_best]}
