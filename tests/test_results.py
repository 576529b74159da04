"""`benchmarks/results.py`: its experiments, text, scoring and page; one of them is trained."""

import gzip
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
    assert names == list(results.TITLES)
    for recipe in results.RECIPES.values():
        config = recipe.config()
        assert set(recipe.published) <= set(recipe.tests)
        assert recipe.averaged <= max(config.train.keep_last, 1)
        assert (recipe.text is not None) == (config.data.corpus == "text")
        assert config.model.has_inputs == bool(recipe.tests)


def test_the_page_has_the_means_of_the_seeds(results, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    for seed, bleu in ((1, 40.0), (2, 42.0)):
        values = {
            "name": "multi30k-en-de", "seed": seed, "commit": "abc", "device": "1 x GPU",
            "steps": 8000, "hours": 1.5, "parameters": 2_600_000,
            "scores": {"test": {
                "bleu": bleu, "interval": 1.25, "chrf": 20 + bleu, "exact": 0.1,
                "signature": "tok:none",
            }},
        }  # fmt: skip
        if seed == 2:
            values["note"] = "Stopped by hand."
        (folder / f"{seed}.json").write_text(json.dumps(values))
    assert results.main(["--page", "--results", str(folder)]) == 0
    page = (tmp_path / "results.md").read_text()
    assert "| test | 41.00 | 41.02 | ± 1.25 | 61.00 | 10.0% |" in page
    assert "Seed 1, 2; 1 x GPU; tok:none; 8,000, 8,000 steps; 1.50, 1.50 hours; commit abc" in page
    assert "\nSeed 2: Stopped by hand." in page
    assert "python benchmarks/results.py --run multi30k-en-de" in page
    assert "Not yet run: `reverse`" in page


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


@pytest.fixture
def raw(tmp_path):
    """Raw corpora of a few lines."""
    english = ["Where is it?", "I know.", "Why did you ask that?", "What a day!", "whatever?"]
    french = ["Où est-ce ?", "Je sais.", "Pourquoi as-tu demandé ça ?", "Quelle journée !", "bof ?"]
    for split in ("train", "valid", "test"):
        for suffix, lines in (("en", english), ("fr", french)):
            path = tmp_path / "tatoeba-eng-fra" / f"{split}.{suffix}.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return tmp_path


def test_questions_start_with_a_wh_word_and_end_with_a_question_mark(results, raw, tmp_path):
    texts = importlib.import_module("reproduction.texts")
    folder = tmp_path / "questions"
    folder.mkdir()
    texts.QUESTIONS.write(raw, folder)
    assert (folder / "test.en").read_text() == "Where is it?\nWhy did you ask that?\n"
    assert (folder / "test.fr").read_text() == "Où est-ce ?\nPourquoi as-tu demandé ça ?\n"


def test_samples_of_a_corpus_contain_the_smaller_ones(results, raw, tmp_path):
    texts = importlib.import_module("reproduction.texts")
    samples = []
    for size in (2, 4):
        folder = tmp_path / f"sample-{size}"
        folder.mkdir()
        texts.tatoeba(size).write(raw, folder)
        samples.append((folder / "train.en").read_text().splitlines())
        assert len((folder / "valid.fr").read_text().splitlines()) == 5
    assert [len(sample) for sample in samples] == [2, 4]
    assert samples[1][:2] == samples[0]


# Narrower than published, and therefore without dropout, and with more and smaller batches.
NARROW = {
    "model": {
        "d_model": 64,
        "d_ff": 128,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "activation_dropout_rate": 0.0,
    },
    "optimizer": {"learning_rate": 0.2, "warmup_steps": 200},
    "train": {
        "num_steps": 1200,
        "batch_tokens": 440,
        "eval_every": 1200,
        "checkpoint_every": 1200,
    },
    "parallel": {"num_devices": 1},
}


@pytest.mark.usefixtures("usual_optimizations")
def test_the_copy_task_is_learned_perfectly(results, tmp_path):
    runs = importlib.import_module("reproduction.runs")
    name = "annotated-copy"
    values = runs.run(name, results.RECIPES[name], tmp_path, tmp_path / "out", 1, NARROW)
    assert values["scores"]["test"]["exact"] == 1
    assert values["scores"]["test"]["bleu"] == pytest.approx(100)
    assert values["steps"] == 1200

    folder = tmp_path / "results"
    folder.mkdir()
    runs.write_json(folder / f"{name}-seed1.json", values)
    assert results.main(["--page", "--results", str(folder)]) == 0
    assert "| 100.0% |" in (tmp_path / "results.md").read_text()
