"""`benchmarks/results.py`: its experiments, text, scoring and page; one of them is trained."""

import dataclasses
import gzip
import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from flaxformer_mt.data.corpora.text_files import read_lines
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.interruption import Interrupted
from flaxformer_mt.run_reader import Run

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


def test_tables_of_many_experiments_have_the_means_of_the_seeds(results, folder):
    for name in ("family-t5", "tatoeba-en-fr-1k"):
        for seed, bleu in ((1, 20.0), (3, 30.0)):
            write_run(folder, name, seed, bleu)
    page = write_page(results, folder)
    assert (
        "| [`family-t5`](found.new/family-t5-seed1.png) | 3.0000 | 20.00 | 25.00 | ± 1.50 | 10,000 "
        "| 3.00 | abc1, abc3 |"
    ) in page
    assert (
        "| [`tatoeba-en-fr-1k`](found.new/tatoeba-en-fr-1k-seed1.png) | 25.00 | ± 1.50 | 45.00 "
        "| 2,000 | 3.00 | abc1, abc3 |"
    ) in page
    assert "Seed 1, 3; 1 x GPU; tok:none." in page
    assert "\n`family-t5`: Trained with Adafactor" in page
    assert (folder / "tatoeba.png").read_bytes().startswith(b"\x89PNG")


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


def test_a_shortened_run_does_not_replace_the_scores_of_the_recipe(results, capsys):
    with pytest.raises(SystemExit):
        results.main(["--run", "reverse", "--num-steps", "10"])
    assert "--num-steps needs --results" in capsys.readouterr().err


def test_tokenized_text_is_scored_as_it_is(results):
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


def write_raw(folder, splits, lines):
    """Writes a raw corpus, with the same lines, by suffix, in every split."""
    folder.mkdir(parents=True)
    for split, (suffix, own) in itertools.product(splits, lines.items()):
        content = "".join(f"{line}\n" for line in own).encode()
        (folder / f"{split}.{suffix}.gz").write_bytes(gzip.compress(content, mtime=0))


def test_subwords_of_multi30k(results, tmp_path):
    texts = importlib.import_module("reproduction.texts")
    lines = {"en": ["A playhouse.", "Two houses, one bird.", "A bird plays, a bird houses."]}
    lines["fr"] = ["Une maison d'oiseau.", "Deux maisons, un oiseau.", "Un oiseau."]
    write_raw(tmp_path / "raw" / "multi30k-en-fr", ("train", "valid", *texts.MULTI30K_TESTS), lines)
    text = texts.multi30k_subwords("fr")
    folder = text.prepare(tmp_path / "raw", tmp_path)
    assert text.is_tokenized
    for suffix, own in lines.items():
        tokenized = [texts.moses(suffix)(line) for line in own]
        for split in ("train", "test_2017_mscoco"):
            segmented = read_lines(folder / f"{split}.{suffix}")
            assert list(map(text.joined, segmented)) == tokenized
    # "play" and "hou" occur twice, "house" at the end of a word only once.
    assert read_lines(folder / "test.en")[0] == "a play@@ hou@@ s@@ e ."
    assert read_lines(folder / "test.fr")[2] == "un oiseau ."


@pytest.mark.parametrize(
    ("segmented", "words"),
    [("a play@@ house", "a playhouse"), ("unfinish@@", "unfinish"), ("@ x@@y", "@ x@@y"), ("", "")],
)
def test_markers_of_subwords_are_removed(results, segmented, words):
    texts = importlib.import_module("reproduction.texts")
    assert texts.without_markers(segmented) == words


@pytest.fixture
def raw(tmp_path):
    """Raw corpora of a few lines."""
    english = ["Where is it?", "I know.", "Why did you ask that?", "What a day!", "whatever?"]
    french = ["Où est-ce ?", "Je sais.", "Pourquoi as-tu demandé ça ?", "Quelle journée !", "bof ?"]
    lines = {"en": english, "fr": french}
    write_raw(tmp_path / "tatoeba-eng-fra", ("train", "valid", "test"), lines)
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
    with pytest.raises(UserError, match="has 5 training pairs, fewer than 6"):
        texts.tatoeba(6).write(raw, tmp_path)


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
        "num_steps": 1000,
        "batch_tokens": 440,
        "eval_every": 1000,
        "checkpoint_every": 1000,
    },
    "parallel": {"num_devices": 1},
}


LENGTHS = ("num_steps", "eval_every", "checkpoint_every")


@pytest.mark.slow
def test_the_models_of_an_ensemble_translate_together(results, tmp_path, monkeypatch):
    runs = importlib.import_module("reproduction.runs")
    recipes = importlib.import_module("reproduction.recipe")
    alone = results.RECIPES["annotated-copy"]
    members = tuple(recipes.Member("copies", alone, seed) for seed in (3, 4))
    together = dataclasses.replace(alone, members=members)
    commits = iter(["first", "second", "second", "second", "third", "third", "fourth"])
    monkeypatch.setattr(runs.provenance, "commit", lambda: next(commits))

    def result(steps):
        changes = NARROW | {"train": NARROW["train"] | dict.fromkeys(LENGTHS, steps)}
        return runs.run("ensemble", together, tmp_path, tmp_path / "out", 1, changes)

    assert result(2)["commit"] == "first, second"
    values = result(4)
    assert (values["steps"], values["commit"]) == (8, "first, second")
    assert result(4)["commit"] == "first, second"  # It was finished before the third.
    monkeypatch.setitem(NARROW["optimizer"], "learning_rate", 0.3)
    with pytest.raises(UserError, match="another configuration"):
        result(6)
    assert read_lines(tmp_path / "out" / "copies-seed3.commit") == ["first", "second"]
    assert {name: len(sums) for name, sums in values["data"].items()} == {
        "train": 1, "valid": 1, "test": 1,
    }  # fmt: skip
    folders = [tmp_path / "out" / f"copies-seed{seed}" for seed in (3, 4)]
    sources = read_lines(tmp_path / "out" / "text" / "copies" / "test.in")
    path = tmp_path / "out" / "translations" / "ensemble-seed1" / "test.hypotheses"
    assert read_lines(path) == Translator.from_run(folders).translate(sources)


@pytest.mark.slow
def test_translations_by_teachers_are_added_to_the_training_text(results, raw, tmp_path):
    runs, recipes = (importlib.import_module(f"reproduction.{name}") for name in ("runs", "recipe"))
    alone = of_few_lines(results.RECIPES["family-torch"])
    teachers = tuple(recipes.Member("teacher", alone, seed) for seed in (3, 4))
    taught = dataclasses.replace(alone, teachers=teachers)
    runs.run("taught", taught, raw, tmp_path / "out", 1, TINY)
    folders = [tmp_path / "out" / f"teacher-seed{seed}" for seed in (3, 4)]
    own, with_theirs = (
        tmp_path / "out" / "text" / name for name in ("few", "few-teacher-seed3-teacher-seed4")
    )
    sources, references = (read_lines(own / f"train.{language}") for language in ("en", "fr"))
    translations = Translator.from_run(folders).translate(sources)
    assert read_lines(with_theirs / "train.en") == sources * 2
    assert read_lines(with_theirs / "train.fr") == references + translations
    assert read_lines(with_theirs / "test.fr") == read_lines(own / "test.fr")
    data = Run(tmp_path / "out" / "taught-seed1").config.data
    assert (data.path, data.tokenizer_path) == (str(with_theirs), str(folders[0]))


def test_a_mean_with_a_checkpoint_of_an_interruption_is_refused(results):
    runs = importlib.import_module("reproduction.runs")
    config = results.RECIPES["multi30k-en-de"].config()
    every = config.train.checkpoint_every
    runs._require_regular([every, 2 * every, 2 * every + 1], Path("run"), config)
    with pytest.raises(UserError, match=f"^run was interrupted after {every + 1} steps"):
        runs._require_regular([every, every + 1, 2 * every], Path("run"), config)


@pytest.mark.parametrize(
    ("arguments", "folder_name", "seed", "changed"),
    [
        (["reverse", "--seed", "3"], "out", 3, {}),
        (
            ["reverse", "--seed", "3", "--num-steps", "7"],
            "7-steps",
            3,
            {"train": {"num_steps": 7}, "optimizer": {"total_steps": 1100}},
        ),
        (
            ["questions", "--num-steps", "7"],
            "7-steps",
            1,
            {"train": {"num_steps": 7}, "optimizer": {"total_steps": 1450}},
        ),
        (["family-torch", "--num-steps", "7"], "7-steps", 1, {"train": {"num_steps": 7}}),
        (["multi30k-en-de-best", "--seed", "3"], "out", 1, {}),
    ],
)
def test_where_and_with_which_seed_an_experiment_is_trained(
    results, tmp_path, monkeypatch, capsys, arguments, folder_name, seed, changed
):
    def stop(name, recipe, data, out, given, changes):
        assert (name, out.name, given, changes) == (arguments[0], folder_name, seed, changed)
        raise Interrupted("stopped by SIGTERM")

    monkeypatch.setattr(results, "run", stop)
    folders = [f"--out={tmp_path / 'out'}", f"--results={tmp_path}"]
    assert results.main(["--run", *arguments, *folders]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "results.py: stopped by SIGTERM\n"


def test_an_ensemble_does_not_replace_the_files_of_its_members(results, tmp_path, monkeypatch):
    found, out = tmp_path / "found", tmp_path / "out"
    members = results.RECIPES["multi30k-en-fr-best"].members
    for member in members:
        folder = out / f"{member.name}-seed{member.seed}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f"{member.name}\n")
    monkeypatch.setattr(results, "run", lambda *arguments: {"scores": {}})
    monkeypatch.setattr(results, "plot_curves", lambda folders: Picture())
    arguments = ["--run", "multi30k-en-fr-best", "--out", str(out), "--results", str(found)]
    assert results.main(arguments) == 0
    copies = [path.name for path in sorted(found.glob("*.metrics.jsonl"))]
    assert copies == sorted(
        f"multi30k-en-fr-best-seed1.{member.name}-seed{member.seed}.metrics.jsonl"
        for member in members
    )


TINY = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0},
    "data": {"target_language": "fr", "vocab_size": 320},
    "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2},
    "train": {"num_steps": 6, "batch_tokens": 256, "log_every": 1, "eval_every": 3},
    "parallel": {"num_devices": 1},
}


def of_few_lines(recipe):
    """A recipe with the five pairs of `raw` instead of its text."""
    texts = importlib.import_module("reproduction.texts")
    text = importlib.import_module("reproduction.recipe").Text("few", texts.tatoeba(5).write)
    return dataclasses.replace(recipe, text=text)


@pytest.mark.slow
def test_marian_of_transformers_is_trained_as_ours(results, raw, tmp_path):
    runs = importlib.import_module("reproduction.runs")
    values, metrics, translations = {}, [], []
    for name in ("family-marian", "family-marian-transformers"):
        recipe = of_few_lines(results.RECIPES[name])
        values[name] = runs.run(name, recipe, raw, tmp_path / "out", 1, TINY)
        metrics.append(Run(tmp_path / "out" / f"{name}-seed1").metrics())
        folder = tmp_path / "out" / "translations" / f"{name}-seed1"
        translations.append(read_lines(folder / "test.hypotheses"))
    for split, names in (
        ("train", ("loss", "accuracy", "learning_rate", "target_tokens")),
        ("valid", ("loss", "cross_entropy", "perplexity", "accuracy")),
    ):
        for name in names:
            ours, theirs = ([row[name] for row in rows(split)] for rows in metrics)
            np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert translations[0] == translations[1]
    for key in ("steps", "target_tokens", "parameters", "data"):
        assert len({str(each[key]) for each in values.values()}) == 1


@pytest.mark.slow
def test_the_first_steps_beside_pytorch_have_what_they_rest_on(
    results, tmp_path, folder, monkeypatch
):
    raw = tmp_path / "raw"
    texts = importlib.import_module("reproduction.texts")
    lines = {
        "en": [f"A dog sees {number}." for number in range(40)],
        "de": [f"Ein Hund sieht {number}." for number in range(40)],
    }
    write_raw(raw / "multi30k-en-de", ("train", "valid", *texts.MULTI30K_TESTS), lines)
    for name, value in {
        "NAMES": ("torch", "opennmt-alibi"), "NUM_STEPS": 2, "ROWS": 4, "VOCABULARY": 290,
    }.items():  # fmt: skip
        monkeypatch.setattr(results.first_steps, name, value)
    folders = [f"--data={raw}", f"--out={tmp_path / 'out'}", f"--results={folder}"]
    assert results.main(["--run", "first-steps", *folders]) == 0
    found = json.loads((folder / "first-steps.json").read_text())
    assert [family["name"] for family in found["families"]] == ["torch", "opennmt-alibi"]
    for family in found["families"]:
        assert len(family["ours"]) == 2
        assert 0 <= family["largest_difference"] < 1e-12
    assert (folder / "first-steps.png").exists()
    (fingerprint,) = found["data"]["train"]
    assert len(fingerprint) == 64
    assert (
        f"{found['device']}; {found['hours']:.2f} hours; commit {found['commit']}."
    ) in write_page(results, folder)


class Picture:
    def save(self, path):
        path.write_bytes(b"")


@pytest.mark.slow
@pytest.mark.usefixtures("usual_optimizations")
def test_the_copy_task_is_learned_perfectly(results, tmp_path, folder):
    runs = importlib.import_module("reproduction.runs")
    name = "annotated-copy"
    values = runs.run(name, results.RECIPES[name], tmp_path, tmp_path / "out", 1, NARROW)
    assert values["scores"]["test"]["exact"] == 1
    assert values["scores"]["test"]["bleu"] == pytest.approx(100)
    assert values["steps"] == 1000

    runs.write_json(folder / f"{name}-seed1.json", values)
    assert "| 100.0% |" in write_page(results, folder)
