"""The progress of a run: the best validation, sums of metrics, and their JSON."""

import json
import math

from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.training.reporting.progress import BestSoFar, Interval, Progress


def test_the_best_so_far():
    best = BestSoFar()
    seen = []
    for value in (-math.inf, 1.0, 1.0, 1.4, 1.6, 1.2):
        best = best.after(value, min_delta=0.5)
        seen.append((best.score, best.validations_since))
    assert seen == [(None, 1), (1.0, 0), (1.0, 1), (1.0, 2), (1.6, 0), (1.6, 1)]


def test_sums_give_means_of_what_counted():
    sums = Interval()
    sums.add({"loss": (6.0, 3.0), "r_drop": (0.0, 0.0)})
    sums.add({"loss": (2.0, 1.0), "r_drop": (0.0, 0.0)})
    assert sums.means() == {"loss": 2.0}


def test_progress_comes_back_from_json_to_the_bit():
    interval = Interval(
        {"loss": (0.1 + 0.2, 3.0), "target_tokens": (3.0, 1.0)}, seconds=1 / 3, seconds_waited=1e-9
    )
    progress = Progress(DataPosition(1, 2, 3), interval, 4, BestSoFar(-0.1, 5), BestSoFar())
    progress.skipped_in_a_row += ["loss", "gradient"]
    progress.add_shapes(["[4, 8]", "[2, 16]"])
    progress.add_shapes(["[2, 16]", "[1, 32]"])
    assert progress.batch_shapes == ("[4, 8]", "[2, 16]", "[1, 32]")
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress
