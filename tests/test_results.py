"""`benchmarks/results.py`: its experiments, scoring and page, without training."""

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
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(results.RECIPES)
    for recipe in results.RECIPES.values():
        config = recipe.config()
        assert set(recipe.published) <= set(recipe.tests)
        assert recipe.averaged <= max(config.train.keep_last, 1)
        assert bool(recipe.corpus) == (config.data.corpus == "text")


def test_the_page_has_the_mean_of_the_seeds(results, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for seed, bleu in ((1, 40.0), (2, 42.0)):
        values = {
            "name": "multi30k-en-de", "seed": seed, "commit": "abc", "device": "1 x GPU",
            "steps": 8000, "hours": 1.5, "parameters": 2_600_000, "validation_loss": 3.0,
            "scores": {"test": {
                "bleu": bleu, "interval": 1.25, "chrf": 60.0, "signature": "tok:none",
            }},
        }  # fmt: skip
        (folder / f"{seed}.json").write_text(json.dumps(values))
    assert results.main(["--page", "--results", str(folder)]) == 0
    page = (tmp_path / "results.md").read_text()
    assert "| test | 41.00 | 41.02 | ± 1.25 | 60.00 |" in page
    assert "python benchmarks/results.py --run multi30k-en-de" in page


def test_tokenised_text_is_scored_as_it_is(results):
    from reproduction.runs import score

    references = ["a dog &apos; s ball ."] * 20
    assert score(references, references, tokenized=True)["bleu"] == pytest.approx(100)
    assert "tok:none" in score(references, references, tokenized=True)["signature"]
    assert "tok:13a" in score(references, references, tokenized=False)["signature"]


def test_text_is_prepared_as_moses_does(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    texts = importlib.import_module("reproduction.texts")
    assert (
        texts.moses("en")("Two “young” men's  hats.")
        == "two &quot; young &quot; men &apos;s hats ."
    )
    assert texts.moses("fr")("L'homme d’Œuvre.") == "l&apos; homme d&apos; œuvre ."
