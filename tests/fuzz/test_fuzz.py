"""Malformed input of every kind: a few hundred cases here, 5,000 with `-m slow`.

A case is a function of (kind, seed). To run one again:

    FUZZ_SEEDS=12,40-60 pytest tests/fuzz -k 'cases and damage' -m ''
"""

import os
import random

import pytest

from fuzz import checkpoints, command_lines, configurations, corpora, damage, foreign_folders
from fuzz.core import remove, run_command

MAKERS = {
    "checkpoints": checkpoints.make,
    "command_lines": command_lines.make,
    "configurations": configurations.make,
    "corpora": corpora.make,
    "damage": damage.make,
    "foreign_folders": foreign_folders.make,
}
NUMBERS = {
    "checkpoints": (0, 800),
    "command_lines": (40, 1200),
    "configurations": (0, 800),
    "corpora": (0, 900),
    "damage": (30, 800),
    "foreign_folders": (0, 500),
}
"""Number of cases in every test run, and with `-m slow`."""
BLOCK = 100


def blocks():
    """Yields kinds with ranges of seeds; the quick ones and the thorough ones share none."""
    for kind, (quick, count) in NUMBERS.items():
        if quick:
            yield pytest.param(kind, range(quick), id=kind)
        for start in range(quick, count, BLOCK):
            seeds = range(start, min(start + BLOCK, count))
            yield pytest.param(kind, seeds, id=f"{kind}-{start}", marks=pytest.mark.slow)


def wanted(seeds):
    """Returns the seeds that FUZZ_SEEDS names, by default all of a block."""
    given = os.environ.get("FUZZ_SEEDS")
    if not given:
        return seeds
    bounds = [part.partition("-") for part in given.split(",")]
    return [seed for seed in seeds if any(int(a) <= seed <= int(b or a) for a, _, b in bounds)]


@pytest.mark.parametrize(("kind", "seeds"), list(blocks()))
def test_cases(kind, seeds, world, tmp_path, record_counts):
    failures = []
    for seed in wanted(seeds):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = MAKERS[kind](random.Random(f"{kind} {seed}"), world, folder)
        outcome = run_command(case.arguments, case.stdin, folder)
        problem = case.problem(outcome)
        record_counts(kind, "wrong" if problem else "right" if outcome.code == 0 else "refused")
        if problem:
            failures.append(f"{kind} {seed}: {case}\n    {problem}")
        remove(folder)
    report = "\n\n".join(failures)
    assert not failures, f"{len(failures)} failures\n\n{report}"
