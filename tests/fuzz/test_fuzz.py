"""Malformed input of every kind: some 15 cases here, 7,500 with `-m slow`.

A case is a function of (kind, seed). To run one again:

    FUZZ_SEEDS=12,40-60 pytest tests/fuzz -k 'cases and damage' -m ''
"""

import os
import random

import pytest

from fuzz import (
    checkpoints,
    command_lines,
    configurations,
    containers,
    corpora,
    damage,
    data_sets,
    foreign_folders,
    kills,
    servers,
)
from fuzz.core import remove, run_command
from fuzz.literal_cases import LITERAL_CASES
from fuzz.world import CONFIG

MAKERS = {
    "arrays": containers.arrays,
    "checkpoints": checkpoints.make,
    "command_lines": command_lines.make,
    "configurations": configurations.make,
    "corpora": corpora.make,
    "damage": damage.make,
    "data_sets": data_sets.make,
    "foreign_folders": foreign_folders.make,
    "hostile_runs": containers.hostile_run,
    "vocabularies": containers.vocabulary,
}
NUMBERS = {
    "arrays": (5, 500),
    "checkpoints": (20, 1000),
    "command_lines": (8, 1200),
    "configurations": (4, 700),
    "corpora": (5, 700),
    "damage": (1, 700),
    "data_sets": (3, 500),
    "foreign_folders": (3, 700),
    "hostile_runs": (3, 500),
    "vocabularies": (4, 500),
}
"""Number of first cases, and of all."""
QUICK = ("vocabularies",)
"""Kinds whose first cases are in every test run: they need no run, and no model."""
BLOCK = 100
KILLS = 24


def blocks():
    """Yields kinds with ranges of seeds; the quick ones and the thorough ones share none."""
    for kind, (quick, count) in NUMBERS.items():
        few = [] if kind in QUICK else [pytest.mark.slow]
        yield pytest.param(kind, range(quick), id=kind, marks=few)
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * case.needs_a_run)
        for name, case in LITERAL_CASES.items()
    ],
)
def test_literal_cases(name, world, tmp_path):
    case = LITERAL_CASES[name].case(world, tmp_path)
    problem = case.problem(run_command(case.arguments, case.stdin, tmp_path))
    assert not problem, f"{case}\n    {problem}"


@pytest.mark.parametrize(("kind", "seeds"), list(blocks()))
def test_cases(kind, seeds, world, tmp_path, record_counts):
    failures = []
    for seed in wanted(seeds):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = MAKERS[kind](random.Random(f"{kind} {seed}"), world, folder)
        outcome = run_command(case.arguments, case.stdin, folder)
        problem = case.problem(outcome)
        record_counts(kind, outcome, problem)
        if problem:
            failures.append(f"{kind} {seed}: {case}\n    {problem}")
        remove(folder)
    report = "\n\n".join(failures)
    assert not failures, f"{len(failures)} failures\n\n{report}"


@pytest.mark.slow  # Decided by the tests of tests/data.
def test_intact_data_sets_are_read(world, tmp_path):
    for kind, data in world.data_sets.items():
        case = data_sets.case("intact", kind, data, world, tmp_path)
        outcome = run_command(case.arguments, folder=tmp_path, seconds=120)
        assert (outcome.code, case.problem(outcome)) == (0, ""), outcome


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 500), marks=pytest.mark.slow)])
def test_exported_servers(seeds, world, record_counts):
    server, failures = servers.Server(world), []
    for seed in wanted(seeds):
        stdin, outcome, problem = server.problem(random.Random(f"servers {seed}"), world)
        record_counts("input of the exported server", outcome, problem)
        if problem:
            failures.append(f"servers {seed}: {stdin[:300]!r}\n    {problem}")
    report = "\n\n".join(failures)
    assert not failures, f"{len(failures)} failures\n\n{report}"


@pytest.mark.slow  # Decided by the tests of kills in tests/system.
def test_kills(world, tmp_path, record_counts):
    failures = []
    for seed in wanted(range(KILLS)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case, outcome, problem = kills.problem(random.Random(f"kills {seed}"), world, folder)
        record_counts("kills", outcome, problem)
        if problem:
            failures.append(f"kills {seed}: {case}\n    {problem}")
    report = "\n\n".join(failures)
    assert not failures, f"{len(failures)} failures\n\n{report}"


@pytest.mark.parametrize("old", [old for old, _ in configurations.MISTAKES])
def test_mistakes_change_the_configuration_file(old):
    assert old in CONFIG.read_text()
