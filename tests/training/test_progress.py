"""What a run remembers: the best so far, sums of figures, and all of it through JSON."""

import json
import math

import pytest

from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.training.progress import BestSoFar, Progress, Sums, merit


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
def test_which_figure_is_better(metric, better, worse):
    assert merit(metric, {metric: better}) > merit(metric, {metric: worse})
    assert merit(metric, {metric: better}) > merit(metric, {})


def test_the_best_so_far():
    best = BestSoFar()
    seen = []
    for value in (-math.inf, 1.0, 1.0, 1.4, 1.6, 1.2):
        best = best.after(value, min_delta=0.5)
        seen.append((best.merit, best.validations_since))
    assert seen == [(None, 1), (1.0, 0), (1.0, 1), (1.0, 2), (1.6, 0), (1.6, 1)]


def test_sums_give_means_of_what_counted():
    sums = Sums()
    sums.add({"loss": (6.0, 3.0), "r_drop": (0.0, 0.0)})
    sums.add({"loss": (2.0, 1.0), "r_drop": (0.0, 0.0)})
    assert sums.means() == {"loss": 2.0}


def test_progress_comes_back_from_json_to_the_bit():
    interval = Sums({"loss": (0.1 + 0.2, 3.0)}, seconds=1 / 3, seconds_waited=1e-9)
    progress = Progress(DataPosition(1, 2, 3), interval, 4, BestSoFar(-0.1, 5), BestSoFar())
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
