"""Metrics equal sacreBLEU's, and come with the signatures needed to reproduce them."""

import pytest
import sacrebleu

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate

REFERENCES = ["Ein kleiner Hund läuft über die Wiese.", "Zwei Männer, die lachen."]
HYPOTHESES = ["Ein kleiner hund läuft auf der Wiese.", "Zwei Männer, die lachen."]


def test_metrics_equal_those_of_sacrebleu():
    metrics = evaluate(HYPOTHESES, REFERENCES)
    assert metrics["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert metrics["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert metrics["ter"] == sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score
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


def test_bleu_is_case_sensitive():
    lower = [sentence.lower() for sentence in REFERENCES]
    assert evaluate(REFERENCES, REFERENCES)["bleu"] == pytest.approx(100)
    assert evaluate(lower, REFERENCES)["bleu"] < 80


def test_ter_is_optional():
    assert set(evaluate(HYPOTHESES, REFERENCES, with_ter=False)) == {
        "bleu", "bleu_signature", "chrf", "chrf_signature",
    }  # fmt: skip


def test_different_numbers_of_sentences_are_rejected():
    with pytest.raises(UserError, match="1 translations, but 2 references"):
        evaluate(HYPOTHESES[:1], REFERENCES)
    with pytest.raises(UserError, match="no sentences"):
        evaluate([], [])
