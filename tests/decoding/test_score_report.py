"""The output of the command `score`."""

import json
import math
import re

import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.data.corpora import text_files
from flaxformer_mt.decoding.scoring.score_report import (
    corpus_metrics,
    preferred,
    to_json,
    to_text,
)
from flaxformer_mt.decoding.scoring.scorer import PairScore, ScoredSentence
from flaxformer_mt.errors import UserError

GOOD = PairScore((5, 6, 2), (-0.5, -0.25, -0.25), ("▁ein", "▁Hund", "</s>"), [(0, 0), (2, 1)])
BAD = PairScore((7, 2), (-2.0, -1.0), ("▁eine", "</s>"))


def value(score):
    return score.log_probability


def test_one_translation_is_a_line_of_columns():
    scored = ScoredSentence("a dog", ["ein Hund"], [GOOD])
    assert to_text(ScoredSentence("", [""], [BAD]), value) == "-3.000000"
    assert to_text(scored, value) == "-1.000000\t0-0 2-1"
    assert to_text(scored, value, with_tokens=True) == (
        "-1.000000\t-0.500000 -0.250000 -0.250000\t0-0 2-1"
    )


def test_several_translations_are_compared():
    scored = ScoredSentence("a dog", ["ein Hund", "eine"], [GOOD, BAD])
    assert to_text(scored, value) == "0\t-1.000000\t-3.000000"
    assert to_text(ScoredSentence("", ["", ""], [BAD, GOOD]), value) == "1\t-3.000000\t-1.000000"
    assert [preferred(v) for v in ([2, 1, 1], [1, 1], [1, 2, 3], [1, 3, 3])] == [0, 1, 2, 1]


def test_json_has_all_fields():
    details = {
        "target": "ein Hund",
        "score": -1.0,
        "log_probability": -1.0,
        "tokens": [5, 6, 2],
        "pieces": ["▁ein", "▁Hund", "</s>"],
        "token_log_probabilities": [-0.5, -0.25, -0.25],
        "alignment": "0-0 2-1",
    }
    alone = json.loads(json.dumps(to_json(ScoredSentence("a dog", ["ein Hund"], [GOOD]), value)))
    assert alone == {"source": "a dog", **details}
    several = to_json(
        ScoredSentence("a dog", ["eine", "ein Hund"], [BAD, GOOD]), lambda s: s.tokens[0]
    )
    assert (several["source"], several["preferred"]) == ("a dog", 0)
    assert [each["score"] for each in several["candidates"]] == [7, 5]
    assert "alignment" not in several["candidates"][0]


def test_perplexity_is_of_tokens_and_accuracy_of_sentences():
    corpus = [
        ScoredSentence("", ["", ""], [GOOD, BAD]),
        ScoredSentence("", ["", ""], [BAD, GOOD]),
        ScoredSentence("", [""], [BAD]),
    ]
    assert corpus_metrics(corpus, value) == {
        "sentences": 3,
        "tokens": 7,
        "log_probability": -7.0,
        "perplexity": pytest.approx(math.e),
        "preferred": 1,
        "accuracy": 0.5,
    }
    alone = corpus_metrics(corpus[2:], value)
    assert alone.keys() == {"sentences", "tokens", "log_probability", "perplexity"}


@pytest.fixture
def command(trained_run, tmp_path, capsys):
    """Runs `score` on files with these lines: (exit code, standard output, standard error)."""

    def execute(*arguments, **files):
        for name, lines in files.items():
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        options = [f"--{name}={tmp_path / name}" for name in files]
        code = main(["score", f"--run={trained_run}", *options, *arguments])
        return code, *capsys.readouterr()

    return execute


@pytest.mark.slow
def test_a_corpus_has_a_perplexity(command):
    files = {"source": ["twelve", "Monday"], "target": ["zwölf", "Montag"]}
    metrics = json.loads(command("--summary", **files)[1])
    lines = command("--tokens", **files)[1].splitlines()
    tokens = [float(each) for line in lines for each in line.split("\t")[1].split()]
    assert (metrics["sentences"], metrics["tokens"]) == (2, len(tokens))
    assert metrics["perplexity"] == pytest.approx(math.exp(-sum(tokens) / len(tokens)), rel=1e-4)
    files["contrast"] = ["eins", "zwei"]
    assert json.loads(command("--summary", **files)[1])["accuracy"] in (0, 0.5, 1)


def test_parallel_files_are_read_once(tmp_path, monkeypatch):
    opened = []

    def stream_lines(path):
        opened.append(path)
        return iter(path.read_text().splitlines())

    def written(name, *lines):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    monkeypatch.setattr(text_files, "stream_lines", stream_lines)
    paths = [written("1", "a", "b"), written("2", "c", "d"), written("3", "e", "f")]
    assert [*text_files.stream_parallel(*paths)] == [("a", "c", "e"), ("b", "d", "f")]
    assert opened == paths  # A pipe can be read once only.
    for counts in ((1, 1, 3), (1, 3, 1), (3, 1, 3)):
        paths = [written(f"{n}", *range(count)) for n, count in enumerate(counts)]
        other = next(n for n in (1, 2) if counts[n] != counts[0])
        message = f"{paths[0]} has {counts[0]} lines but {paths[other]} has {counts[other]}: "
        with pytest.raises(UserError, match=re.escape(message)):
            list(text_files.stream_parallel(*paths))
