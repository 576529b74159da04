"""Malformed input of every kind: some 10 cases here, 4,000 with `-m slow`.

A case is a function of (kind, seed). To run one again:

    FUZZ_SEEDS=12,40-60 pytest tests/fuzz -k 'cases and damage' -m ''
"""

import os
import random

import pytest

from fuzz import (
    command_lines,
    corpora,
    damage,
    data_sets,
    foreign_folders,
)
from fuzz.core import remove, run_command
from fuzz.literal_cases import LITERAL_CASES, WITHOUT_A_RUN

MAKERS = {
    "command_lines": (command_lines.make, 1200),
    "corpora": (corpora.make, 700),
    "damage": (damage.make, 700),
    "data_sets": (data_sets.make, 500),
    "foreign_folders": (foreign_folders.make, 700),
    "vocabularies": (foreign_folders.vocabulary, 500),
}
"""Makers of the kinds, and numbers of cases."""
BLOCK = 100


def blocks():
    """Yields kinds with ranges of seeds; the first need no run, and are in every test run."""
    yield pytest.param("vocabularies", range(4), id="vocabularies")
    for kind, (_, count) in MAKERS.items():
        for start in range(0, count, BLOCK):
            seeds = range(start, min(start + BLOCK, count))
            yield pytest.param(kind, seeds, id=f"{kind}-{start}", marks=pytest.mark.slow)


def wanted(seeds):
    """Returns the seeds that FUZZ_SEEDS names, by default all of a block."""
    given = os.environ.get("FUZZ_SEEDS")
    if not given:
        return seeds
    bounds = [part.partition("-") for part in given.split(",")]
    return [seed for seed in seeds if any(int(a) <= seed <= int(b or a) for a, _, b in bounds)]


@pytest.mark.parametrize(
    "make",
    [*WITHOUT_A_RUN, *(pytest.param(each, marks=pytest.mark.slow) for each in LITERAL_CASES)],
)
def test_literal_cases(make, world, tmp_path):
    case = make(world, tmp_path)
    problem = case.problem(run_command(case.arguments, case.stdin, tmp_path))
    assert not problem, f"{case}\n    {problem}"


@pytest.mark.parametrize(("kind", "seeds"), list(blocks()))
def test_cases(kind, seeds, world, tmp_path):
    make, failures = MAKERS[kind][0], []
    for seed in wanted(seeds):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = make(random.Random(f"{kind} {seed}"), world, folder)
        problem = case.problem(run_command(case.arguments, case.stdin, folder))
        if problem:
            failures.append(f"{kind} {seed}: {case}\n    {problem}")
        remove(folder)
    report = "\n\n".join(failures)
    assert not failures, f"{len(failures)} failures\n\n{report}"
