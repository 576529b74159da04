"""Which checkpoints of a run are kept: ranking by a validation metric."""

import math
from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import ValidationMetric

_LOWER_IS_BETTER = {"loss", "cross_entropy", "perplexity"}


def ranking_score(metric: ValidationMetric, metrics: Mapping[str, Any]) -> float:
    """Returns the score that ranks a validation by one of its metrics; higher is better.

    The score is the metric, negated if lower is better; -inf if it is missing or not finite.
    """
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return -math.inf
    return -value if metric in _LOWER_IS_BETTER else value


def metric_of(metric: ValidationMetric, score: float) -> float:
    """Returns the metric of a finite `ranking_score`."""
    return -score if metric in _LOWER_IS_BETTER else score


def ranked(scores: Mapping[int, float]) -> list[int]:
    """Returns steps by descending score; of equal ones the earlier first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


def validated_steps(scores: Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite score, by descending score."""
    return [step for step in ranked(scores) if math.isfinite(scores[step])]


def best_step(scores: Mapping[int, float]) -> int | None:
    """Returns the best step, the newest if none was validated; None if there is none."""
    return next(iter(validated_steps(scores)), max(scores, default=None))


def kept_steps(scores: Mapping[int, float], keep_last: int, keep_best: int) -> set[int]:
    """Returns the steps whose checkpoints are kept.

    Args:
      scores: ranking score of every checkpoint, by step; -inf without a validation.
      keep_last: number of the newest checkpoints to keep.
      keep_best: number of the best checkpoints to keep.
    """
    return {*sorted(scores)[-keep_last:], *validated_steps(scores)[:keep_best]}
