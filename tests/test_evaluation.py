"""Metrics equal sacreBLEU's, and come with the signatures needed to reproduce them."""

import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import sacrebleu

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import compare, evaluate

REFERENCES = ["Ein kleiner Hund läuft über die Wiese.", "Zwei Männer, die lachen."]
HYPOTHESES = ["Ein kleiner hund läuft auf der Wiese.", "Zwei Männer, die lachen."]


def test_metrics_equal_those_of_sacrebleu():
    metrics = evaluate(HYPOTHESES, REFERENCES)
    assert metrics["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert metrics["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert metrics["ter"] == sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score
    plus = sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES], word_order=2).score
    assert metrics["chrf++"] == plus != metrics["chrf"]
    assert 0 < metrics["bleu"] < 100


def test_signatures_are_of_cased_detokenized_text():
    metrics = evaluate(HYPOTHESES, REFERENCES)
    version = sacrebleu.__version__
    assert (
        metrics["bleu_signature"]
        == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    )
    assert metrics["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")
    assert metrics["ter_signature"].startswith("nrefs:1|case:lc|tok:tercom")


SPACELESS = {
    "これはペンです。": ("char", "tercom-char"),
    "今日は天気が良いので散歩します。": ("char", "tercom"),
    "我们今天去北京，好吗？": ("zh", "tercom"),
    "ฉันรักกาแฟมาก": ("char", "tercom-char"),
    "ကျွန်တော်ကော်ဖီကြိုက်တယ်": ("char", "tercom-char"),
}


@pytest.mark.parametrize(("reference", "tokenizers"), SPACELESS.items())
def test_the_text_says_how_its_words_are_separated(reference, tokenizers):
    almost = reference[:-2] + reference[-1:]
    for text in ([reference] * 3, [reference, "OK.", "A few words of English beside it."]):
        metrics = evaluate([almost, *text[1:]], text)
        assert f"|tok:{tokenizers[0]}|" in metrics["bleu_signature"]
        assert f"|tok:{tokenizers[1]}|norm:yes|punct:yes|asian:yes|" in metrics["ter_signature"]
        assert 50 < metrics["bleu"] < 100
        assert 0 < metrics["ter"] < 20


@pytest.mark.parametrize(
    "references",
    [
        ["Ein Hund."],
        ["Cà phê 咖啡 rất ngon, bạn ơi."],
        [""],
    ],
)
def test_words_with_spaces_have_the_tokenizers_of_sacrebleu(references):
    metrics = evaluate(references, references)
    assert "|tok:13a|" in metrics["bleu_signature"]
    assert "|tok:tercom|norm:no|punct:yes|asian:no|" in metrics["ter_signature"]


@pytest.mark.parametrize(
    ("reference", "tokenize", "is_wrong"),
    [
        ("これはペンです。", "13a", True),
        ("これはペンです。", "char", False),
        ("我们今天去北京", "zh", False),
        ("Ein Hund.", "13a", False),
    ],
)
def test_a_chosen_tokenizer_that_separates_nothing_is_warned_of(
    reference, tokenize, is_wrong, caplog
):
    metrics = evaluate([reference], [reference], tokenize=tokenize)
    assert f"|tok:{tokenize}|" in metrics["bleu_signature"]
    assert ("BLEU is no measure of quality here" in caplog.text) == is_wrong


def test_sentences_without_any_reference_are_counted(caplog):
    texts = ["a dog sleeps", "a cat sleeps", "birds fly south"]
    evaluate(texts, [["a dog sleeps", "", "birds fly"], ["", "a cat", "birds fly"]])
    assert not caplog.records
    evaluate(texts, ["a dog sleeps", "\u200b ", ""])
    assert "2 of 3 references are empty (the first is number 2)" in caplog.text


def test_different_numbers_of_sentences_are_rejected():
    with pytest.raises(UserError, match="1 translations, but 2 references"):
        evaluate(HYPOTHESES[:1], REFERENCES)
    with pytest.raises(UserError, match="no sentences"):
        evaluate([], [])


# Its numbers of type float32 are not JSON.
SACREBLEU = """
import json
json.JSONEncoder.default = lambda encoder, number: number.item()
from sacrebleu.sacrebleu import main
main()
"""
SHORT = {"chrF2": "chrf", "chrF2++": "chrf++", "BLEU": "bleu", "TER": "ter"}


def mixed_up(sentences, rate, seed):
    """Returns translations in which some words are replaced by words of other sentences."""
    rng = random.Random(seed)
    words = " ".join(sentences).split()
    return [
        " ".join(rng.choice(words) if rng.random() < rate else word for word in sentence.split())
        for sentence in sentences
    ]


def toy_systems(count):
    rng = random.Random(0)
    words = [
        "ein",
        "kleiner",
        "Hund",
        "läuft",
        "über",
        "die",
        "grüne",
        "Wiese",
        ",",
        "und",
        "bellt",
        "laut",
        "!",
    ]
    references = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(count)]
    systems = {
        name: mixed_up(references, rate, seed)
        for seed, (name, rate) in enumerate({"first": 0.3, "second": 0.3, "third": 0.9}.items())
    }
    return systems, [references, mixed_up(references, 0.2, 9)]


def sacrebleu_command(folder, systems, references, *options, seed="12345"):
    """Returns what the program `sacrebleu` prints as JSON, for all metrics."""
    files = {"reference.1": references[0], "reference.2": references[1], **systems}
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, "-c", SACREBLEU, "reference.1", "reference.2", "-i", *systems]
    command += ["-f", "json", "-w", "10", *options]
    outputs = []
    for metrics in (["bleu", "chrf", "ter"], ["chrf", "--chrf-word-order", "2"]):
        result = subprocess.run(
            [*command, "-m", *metrics],
            cwd=folder,
            env={**os.environ, "SACREBLEU_SEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(json.loads(result.stdout))
    return outputs


def check_intervals(folder, count, resamples, monkeypatch):
    systems, references = toy_systems(count)
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    ours = evaluate(systems["first"], references, confidence=True, resamples=resamples)
    one = {"first": systems["first"]}
    options = ("--confidence", "--confidence-n", str(resamples))
    several, single = sacrebleu_command(folder, one, references, *options, seed="7")
    assert [each["name"] for each in (*several, single)] == ["BLEU", "chrF2", "TER", "chrF2++"]
    for theirs in (*several, single):
        name = SHORT[theirs["name"]]
        assert round(ours[name], 10) == theirs["score"]
        assert round(ours[f"{name}_mean"], 10) == theirs["confidence_mean"]
        assert round(ours[f"{name}_interval"], 10) == theirs["confidence_var"] > 0
        assert ours[f"{name}_signature"] == theirs["signature"]
        assert f"|bs:{resamples}|seed:7|" in theirs["signature"]


def check_paired_test(folder, count, kind, option, resamples):
    systems, references = toy_systems(count)
    ours = compare(systems, references, significance=kind, resamples=resamples)
    options = (f"--paired-{option}", f"--paired-{option}-n", str(resamples))
    outputs = sacrebleu_command(folder, systems, references, *options)
    p_values = []
    for theirs in zip(*outputs, systems, strict=True):
        *listed, system = theirs
        results = {SHORT[key]: value for each in listed for key, value in each.items()
                   if key in SHORT}  # fmt: skip
        assert set(results) == set(ours[system])
        for name, expected in results.items():
            found = ours[system][name]
            assert found.score == expected["score"]
            assert found.p_value == expected["p_value"]
            assert found.mean == expected["mean"]
            assert found.interval == expected["ci"]
            p_values.append(found.p_value)
    assert p_values[:4] == [None] * 4
    assert 0 < min(p_values[4:]) < 0.05 < max(p_values[4:]) <= 1


def test_intervals_equal_those_of_sacrebleus_program(tmp_path, monkeypatch):
    check_intervals(tmp_path, 12, 40, monkeypatch)


@pytest.mark.slow_except("bootstrap-bs")
@pytest.mark.parametrize(("kind", "option"), [("bootstrap", "bs"), ("randomization", "ar")])
def test_p_values_equal_those_of_sacrebleus_program(tmp_path, kind, option):
    check_paired_test(tmp_path, 30, kind, option, 50)


def test_options_of_sacrebleu():
    metrics = evaluate(HYPOTHESES, REFERENCES, tokenize="char", lowercase=True)
    assert (
        metrics["bleu"]
        == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize="char", lowercase=True).score
    )
    assert "case:lc|eff:no|tok:char" in metrics["bleu_signature"]
    assert metrics["chrf"] > evaluate(HYPOTHESES, REFERENCES)["chrf"]
    assert "case:lc" in metrics["chrf++_signature"]


def test_several_references():
    systems, references = toy_systems(10)
    metrics = evaluate(systems["first"], references)
    assert metrics["bleu"] == sacrebleu.corpus_bleu(systems["first"], references).score
    assert evaluate(references[1], references)["bleu"] == pytest.approx(100)
    assert evaluate(references[1], references[0])["bleu"] < 90
    assert "nrefs:2|" in metrics["bleu_signature"]
    with pytest.raises(UserError, match="10 translations, but 9 references"):
        evaluate(systems["first"], [references[0], references[1][:9]])


def shared_words(sources, hypotheses, references):
    """A metric like those of neural networks: one number per sentence."""
    assert sources is None or len(sources) == len(hypotheses)
    return [
        len({*hypothesis.split()} & {*reference.split()}) / len(reference.split())
        for hypothesis, reference in zip(hypotheses, references[0], strict=True)
    ]


def test_a_function_that_scores_sentences_is_resampled_as_other_metrics():
    """It is compared with numpy, and with sacreBLEU's indices of the resamples."""
    systems, references = toy_systems(20)
    arguments = {"metrics": {"shared": shared_words}, "standard": (), "resamples": 30}
    found = evaluate(systems["first"], references, confidence=True, **arguments)
    values = np.array(shared_words(None, systems["first"], references))
    assert found["shared"] == pytest.approx(values.mean())
    indices = np.random.default_rng(12345).choice(20, size=(30, 20), replace=True)
    means = np.sort(values[indices].mean(axis=1))
    assert found["shared_mean"] == pytest.approx(means.mean(), rel=1e-6)
    assert found["shared_interval"] == pytest.approx((means[-1] - means[0]) / 2, rel=1e-6)
    assert found["shared_signature"] == (
        "nrefs:2|bs:30|seed:12345|function:test_evaluation.shared_words"
    )
    for kind in ("bootstrap", "randomization"):
        scores = compare(systems, references, significance=kind, **arguments)
        assert scores["first"]["shared"].p_value is None
        assert 0 < scores["third"]["shared"].p_value < 0.05 < scores["second"]["shared"].p_value


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ("good", TypeError, "a number or one for each of the 2 sentences, not str of length 4"),
        ([0.5], TypeError, "not list of length 1"),
        (None, UserError, "the metric mine returned a number that is not finite"),
        ([0.5, float("nan")], UserError, "a number that is not finite"),
    ],
)
def test_what_a_function_may_not_return(result, error, message):
    with pytest.raises(error, match=message):
        evaluate(HYPOTHESES, REFERENCES, metrics={"mine": lambda *given: result})


def test_unknown_options_are_named(monkeypatch):
    with pytest.raises(UserError, match="unknown metric 'blue'; did you mean bleu"):
        evaluate(HYPOTHESES, REFERENCES, standard=("blue",))
    with pytest.raises(UserError, match="unknown tokenizer '14a'; sacreBLEU has none, zh, 13a"):
        evaluate(HYPOTHESES, REFERENCES, tokenize="14a")
    with pytest.raises(UserError, match="the metric bleu is sacreBLEU's"):
        evaluate(HYPOTHESES, REFERENCES, metrics={"bleu": lambda *given: 1.0})
    with pytest.raises(UserError, match="1,000,000,000,000 resamples of 2 sentences take at least"):
        evaluate(HYPOTHESES, REFERENCES, confidence=True, resamples=10**12)
    monkeypatch.setenv("SACREBLEU_SEED", "first")
    with pytest.raises(UserError, match="SACREBLEU_SEED=first: must be a whole number"):
        evaluate(HYPOTHESES, REFERENCES, confidence=True)


def test_what_a_tokenizer_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    with pytest.raises(UserError, match=r"ja-mecab cannot be used: .* pip install"):
        evaluate(HYPOTHESES, REFERENCES, tokenize="ja-mecab")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"significance": "boot"}, UserError, "significance='boot': choose bootstrap or random"),
        ({"significance": "bootstrap", "resamples": -5}, UserError, "resamples=-5: give 2 or"),
        ({"confidence": True, "resamples": 1}, UserError, "resamples=1: give 2 or more"),
        ({"confidence": True, "resamples": "9"}, TypeError, "resamples must be a number, not str"),
        (
            {"standard": "bleu"},
            TypeError,
            "standard must be a list of strings, not a single string",
        ),
    ],
)
def test_options_of_comparisons_are_checked(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        compare({"a": ["a"], "b": ["b"]}, ["a"], **options)


def test_references_in_several_scripts_are_warned_of(caplog):
    german, japanese = ["Das ist ein Satz."] * 8, ["\u3053\u308c\u306f\u6587\u3067\u3059\u3002"] * 2
    references = [*german, *japanese]
    assert "tok:13a" in evaluate(references, references, standard=["bleu"])["bleu_signature"]
    assert "20% of the references are in a script without spaces" in caplog.text
    caplog.clear()
    references = [*japanese * 5, german[0]]
    assert "tok:char" in evaluate(references, references, standard=["bleu"])["bleu_signature"]
    assert not caplog.messages


def test_what_the_tokenizer_zh_treats_wrongly_is_said(caplog):
    texts = ["\u4f60\u597d\u4e16\u754c\u3002"] * 3
    assert "tok:zh" in evaluate(texts, texts, standard=["bleu"])["bleu_signature"]
    assert not caplog.messages
    texts += ["\u4f60\u597d\u2026\u2026", "\u4f60\U00020000\U0002a6d7\u597d"]
    evaluate(texts, texts, standard=["bleu"])
    assert "2 of 5 references have" in caplog.text
