"""`benchmarks/results.py`: its experiments, text, scoring and page; one of them is trained."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("results")


def test_every_experiment_is_listed_and_has_a_configuration(results, capsys):
    assert results.main(["--list"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert names == {*results.RECIPES, "first-steps"}
    assert {"multi30k-en-de", "family-t5", "questions", "tatoeba-en-fr-1k"} <= names
    for recipe in results.RECIPES.values():
        config = recipe.config()
        assert set(recipe.published) <= set(recipe.tests)
        assert recipe.averaged <= max(config.train.keep_last, 1)
        assert (recipe.text is not None) == (config.data.corpus == "text")
        assert config.model.has_inputs == bool(recipe.tests)


def write_run(folder, name, seed, bleu, **changes):
    """Writes the result of a run; its other values depend on the seed."""
    score = {
        "bleu": bleu, "interval": 1 + seed / 4, "chrf": 20 + bleu, "exact": seed / 10,
        "signature": "tok:none",
    }  # fmt: skip
    values = {
        "name": name, "seed": seed, "commit": f"abc{seed}", "device": "1 x GPU",
        "command": f"python benchmarks/results.py --run {name} --seed {seed}",
        "steps": 1000 * seed, "hours": 1.5 * seed, "parameters": 2_600_000,
        "tokens_per_second": 5000.0 * seed,
        "validation": {"loss": 1.0 + seed, "perplexity": 10.0 * seed, "accuracy": 0.5},
        "scores": {"test": score},
    }  # fmt: skip
    (folder / f"{name}-seed{seed}.json").write_text(json.dumps(values | changes))


@pytest.fixture
def folder(tmp_path):
    """A folder for results."""
    path = tmp_path / "found.new"
    path.mkdir()
    return path


def write_page(results, folder):
    assert results.main(["--page", "--results", str(folder)]) == 0
    return (folder.parent / "found.new.md").read_text()


def test_the_page_has_the_means_of_the_seeds(results, folder):
    write_run(folder, "multi30k-en-de", 10, 42.0, note="Stopped by hand.")
    write_run(folder, "multi30k-en-de", 2, 40.0)
    page = write_page(results, folder)
    assert "| test | 41.00 | 41.02 | ± 2.50 | 61.00 | 60.0% |" in page
    assert (
        "Seed 2, 10; 1 x GPU; tok:none; 2,000, 10,000 steps; mean of the last 10 checkpoints; "
        "3.00, 15.00 hours; commit abc2, abc10; 2,600,000 parameters."
    ) in page
    assert "\nSeed 10: Stopped by hand." in page
    for seed in (2, 10):
        assert f"`python benchmarks/results.py --run multi30k-en-de --seed {seed}`" in page
    assert "![curves](found.new/multi30k-en-de-seed2.png)" in page
    assert "Not yet run: `reverse`" in page
    assert "Not yet run: `family-jadore801120`" in page
    assert "`first-steps`." in page


def test_the_page_of_the_repository_is_that_of_its_results(results, folder):
    docs = BENCHMARKS.parent / "docs"
    for path in (docs / "results").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "tatoeba.png").unlink(missing_ok=True)
    page = write_page(results, folder)
    assert page.replace("(found.new/", "(results/") == (docs / "results.md").read_text()


def test_a_page_without_results_is_refused(results, tmp_path, capsys):
    assert results.main(["--page", "--results", str(tmp_path / "typo")]) == 1
    assert "typo has no JSON file of a run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tokenized_text_is_scored_as_it_is(results):
    from reproduction.runs import score

    references = ["a dog &apos; s ball ."] * 20
    assert score(references, references, tokenized=True)["bleu"] == pytest.approx(100)
    assert "tok:none" in score(references, references, tokenized=True)["signature"]
    assert "tok:13a" in score(references, references, tokenized=False)["signature"]
