"""sacreBLEU's own figures, with what is needed to compute them again."""

import pytest
import sacrebleu

from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate

REFERENCES = ["Ein kleiner Hund läuft über die Wiese.", "Zwei Männer, die lachen."]
HYPOTHESES = ["Ein kleiner hund läuft auf der Wiese.", "Zwei Männer, die lachen."]


def test_figures_are_those_of_sacrebleu():
    figures = evaluate(HYPOTHESES, REFERENCES)
    assert figures["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert figures["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert figures["ter"] == sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score
    assert 0 < figures["bleu"] < 100


def test_signatures_say_cased_and_detokenised():
    figures = evaluate(HYPOTHESES, REFERENCES)
    version = sacrebleu.__version__
    assert (
        figures["bleu_signature"]
        == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    )
    assert figures["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")
    assert figures["ter_signature"].startswith("nrefs:1|case:lc|tok:tercom")


def test_case_counts():
    lower = [sentence.lower() for sentence in REFERENCES]
    assert evaluate(REFERENCES, REFERENCES)["bleu"] == pytest.approx(100)
    assert evaluate(lower, REFERENCES)["bleu"] < 80


def test_ter_can_be_left_out():
    assert set(evaluate(HYPOTHESES, REFERENCES, with_ter=False)) == {
        "bleu", "bleu_signature", "chrf", "chrf_signature",
    }  # fmt: skip


def test_different_numbers_of_sentences_are_refused():
    with pytest.raises(UserError, match="1 translations, but 2 references"):
        evaluate(HYPOTHESES[:1], REFERENCES)
    with pytest.raises(UserError, match="no sentences"):
        evaluate([], [])
