"""The intact files that cases start from, and the counts of outcomes."""

import collections
import json
import os
import time
from pathlib import Path

import pytest

from fuzz.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def record_counts(request):
    """Counts outcomes; prints them for `-rP`, and adds them to the file FUZZ_COUNTS, if given."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    start = time.process_time()

    def record(kind, outcome, problem):
        counts[kind, "wrong" if problem else "right" if outcome.code == 0 else "refused"] += 1

    yield record
    for kind in {kind for kind, _ in counts}:
        row = {"kind": kind} | {name: counts[kind, name] for name in ("right", "refused", "wrong")}
        row["processor_seconds"] = round(time.process_time() - start)
        print(json.dumps(row))
        if "FUZZ_COUNTS" in os.environ:
            with Path(os.environ["FUZZ_COUNTS"]).open("a") as file:
                file.write(json.dumps(row) + "\n")
