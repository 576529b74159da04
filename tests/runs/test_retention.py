"""Ranking scores of validations, and the checkpoints that are kept."""

import math

import pytest

from flaxformer_mt.runs.step_folders import kept_steps, ranking_score, validated_steps


@pytest.mark.parametrize(
    ("metric", "better", "worse"),
    [
        ("loss", 1.0, 2.0),
        ("cross_entropy", 1.0, 2.0),
        ("perplexity", 1.0, 2.0),
        ("accuracy", 2.0, 1.0),
        ("bleu", 2.0, 1.0),
        ("chrf", 2.0, 1.0),
        ("bleu", -1.0, math.nan),
        ("loss", 1e9, math.inf),
    ],
)
def test_which_metric_value_is_better(metric, better, worse):
    assert ranking_score(metric, {metric: better}) > ranking_score(metric, {metric: worse})
    assert ranking_score(metric, {metric: better}) > ranking_score(metric, {})


def test_of_equal_scores_the_earlier_step_ranks_first():
    assert validated_steps({3: 1.0, 1: 1.0, 2: 2.0, 4: -math.inf}) == [2, 1, 3]


def test_the_newest_and_the_best_steps_are_kept():
    scores = {1: 3.0, 2: 2.0, 3: 1.0, 4: -math.inf, 5: 0.0}
    assert kept_steps(scores, keep_last=1, keep_best=2) == {1, 2, 5}
    assert kept_steps({4: -math.inf, 5: -math.inf}, keep_last=1, keep_best=2) == {5}
    assert kept_steps(scores, keep_last=2, keep_best=0) == {4, 5}
