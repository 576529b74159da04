"""The command `evaluate` on translations that are there already."""

import json

import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.evaluation import compare, evaluate

REFERENCES = ["Ein kleiner Hund läuft über die Wiese.", "Zwei Männer, die lachen.", "Ja."]
FIRST = ["Ein kleiner hund läuft auf der Wiese.", "Zwei Männer, die lachen.", "Nein."]
SECOND = ["Hunde laufen.", "Zwei Männer lachen.", "Ja."]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The names of text files in the current folder."""
    monkeypatch.chdir(tmp_path)
    texts = {"test.de": REFERENCES, "other.de": SECOND, "a.de": FIRST, "b.de": SECOND}
    for name, lines in {**texts, "two.de": FIRST[:2], "source.en": ["a", "b", "c"]}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


@pytest.fixture
def command(capfd, files):
    """Runs the command in the folder of the files; returns exit code, output and errors."""

    def execute(*arguments):
        code = main(["evaluate", *arguments])
        return code, *capfd.readouterr()

    return execute


def rounded(values):
    return {
        key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()
    }


def test_an_existing_translation(command):
    code, out, err = command("--hypothesis", "a.de", "--reference", "test.de")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"sentences": 3, **rounded(evaluate(FIRST, REFERENCES))}


def test_translations_that_look_wrong_are_counted(command, files):
    references = [f"Satz {number} von hier." for number in range(200)]
    translations = [*[""] * 10, *(f"{text}...." for text in references[10:20]), *references[20:]]
    for name, lines in {"long.de": references, "c.de": translations}.items():
        (files / name).write_text("".join(f"{line}\n" for line in lines))
    arguments = ("--hypothesis", "c.de", "--reference", "long.de", "--metric", "bleu")
    assert json.loads(command(*arguments)[1])["doubtful"] == {"empty": 10, "repetitive": 10}
    table = command(*arguments, "--format", "table")[1]
    assert "c.de: of 200 translations, 10 are empty, 10 end in a run of one token" in table


def test_several_systems_references_and_options(command):
    _, out, _ = command(
        "--hypothesis", "a.de", "--hypothesis", "b.de", "--reference", "test.de",
        "--reference", "other.de", "--metric", "bleu", "--tokenize", "intl", "--lowercase",
        "--confidence", "--resamples", "20",
    )  # fmt: skip
    options = {"standard": ["bleu"], "tokenize": "intl", "lowercase": True}
    options |= {"confidence": True, "resamples": 20}
    assert json.loads(out) == {
        "sentences": 3,
        "systems": [
            {"system": name, **rounded(evaluate(text, [REFERENCES, SECOND], **options))}
            for name, text in (("a.de", FIRST), ("b.de", SECOND))
        ],
    }
    assert "bleu_interval" in out


def test_a_baseline(command):
    for options, kind in (((), "bootstrap"), (("--significance", "randomization"),) * 2):
        _, out, _ = command(
            "--hypothesis", "a.de", "--baseline", "b.de", "--reference", "test.de",
            "--resamples", "20", *options,
        )  # fmt: skip
        scores = compare(
            {"b.de": SECOND, "a.de": FIRST}, REFERENCES, resamples=20,
            significance=kind if isinstance(kind, str) else kind[1],
        )  # fmt: skip
        baseline, other = json.loads(out)["systems"]
        assert (baseline["system"], other["system"]) == ("b.de", "a.de")
        assert "chrf_p_value" not in baseline
        assert other["chrf_p_value"] == round(scores["a.de"]["chrf"].p_value, 4)
        assert ("chrf_interval" in other) == (not options)


def test_a_function_of_the_users(command, files):
    (files / "mine.py").write_text(
        "def sizes(sources, hypotheses, references):\n"
        "    return [len(text) - len(source) for text, source in zip(hypotheses, sources)]\n"
    )
    _, out, _ = command(
        "--hypothesis", "a.de", "--reference", "test.de", "--source", "source.en",
        "--metric", "chrf", "--metric", "mine:sizes",
    )  # fmt: skip
    found = json.loads(out)
    assert set(found) == {
        "sentences", "chrf", "chrf_signature", "sizes", "sizes_signature",
    }  # fmt: skip
    assert found["sizes"] == round(sum(len(text) - 1 for text in FIRST) / 3, 4)
    assert found["sizes_signature"] == "nrefs:1|function:mine.sizes"


def test_a_function_of_the_users_that_fails_is_named(command, files):
    (files / "failing.py").write_text(
        "def broken(sources, hypotheses, references):\n    return 1 / 0\n"
    )
    code, out, err = command(
        "--hypothesis", "a.de", "--reference", "test.de", "--metric", "failing:broken"
    )
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert "--metric failing:broken: ZeroDivisionError: division by zero (" in line
    assert line.endswith("failing.py, line 2)")


@pytest.mark.parametrize(
    ("options", "seed", "message"),
    [
        (("--n-best", "2"), "1", "evaluate scores one translation per sentence: remove --n-best"),
        (("--confidence",), "x", "SACREBLEU_SEED=x: must be a whole number"),
    ],
)
def test_options_are_checked_before_the_translation(
    command, trained_run, monkeypatch, options, seed, message
):
    def no_translation(*arguments, **options):
        raise AssertionError("the test set was translated")

    monkeypatch.setattr(Translator, "translate", no_translation)
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    texts = ("--source", "source.en", "--reference", "test.de")
    code, out, err = command("--run", str(trained_run), *texts, *options)
    assert (code, out) == (1, "")
    assert message in err


def test_the_table(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, err = command(
        "--hypothesis", "a.de", "--baseline", "b.de", "--reference", "test.de",
        "--resamples", "20", "--format", "table",
    )  # fmt: skip
    assert err == ""
    table, notes = out.split("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["system", "BLEU", "chrF", "chrF++", "TER"]
    assert max(map(len, lines)) <= 80
    scores = compare(
        {"b.de": SECOND, "a.de": FIRST}, REFERENCES, significance="bootstrap", resamples=20
    )
    assert lines[1].split() == ["b.de", *(f"{each.score:.2f}" for each in scores["b.de"].values())]
    bleu = scores["a.de"]["bleu"]
    assert f"{bleu.mean:.2f} ± {bleu.interval:.2f}" in lines[4]
    assert f"p = {bleu.p_value:.4f}" in lines[5]
    assert f"BLEU: {bleu.signature}" in notes.splitlines()
    assert "p: paired bootstrap against b.de; * below 0.05" in notes.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--run or --hypothesis is missing"),
        ("--hypothesis a.de", "--reference is missing"),
        (
            "--hypothesis two.de --reference test.de",
            "two.de has 2 lines but test.de has 3: line i of one must translate line i",
        ),
        ("--hypothesis no.de --reference test.de", "there is no file no.de"),
        (
            "--hypothesis a.de --baseline ./a.de --reference test.de",
            "a.de is given twice, by --baseline and --hypothesis",
        ),
        ("--baseline a.de --reference test.de", "--baseline needs --hypothesis or --run"),
        ("--hypothesis a.de --reference test.de --metric no:f", "No module named 'no'"),
        ("--hypothesis a.de --reference test.de --metric os:f", "has no attribute 'f'"),
        ("--hypothesis a.de --reference test.de --output x", "--output is for --run only"),
        ("--hypothesis a.de --reference test.de --beam-size 2", "search options are for --run"),
        (
            "--hypothesis a.de --reference test.de --resamples 9",
            "--resamples is for --confidence and --baseline only",
        ),
    ],
)
def test_errors_are_one_line(command, files, arguments, message):
    (files / "empty").touch()
    code, out, err = command(*arguments.split())
    assert (code, out) == (1, "")
    assert err.startswith("flaxformer-mt: error: ")
    assert err.count("\n") == 1
    assert message in err
