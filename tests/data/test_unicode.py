"""Unicode normalization of learned vocabularies, and invisible text."""

import unicodedata

import pytest
from talker import make_talker

import flaxformer_mt as fmt
from flaxformer_mt import evaluation
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.filters import PairFilter
from flaxformer_mt.data.corpora.text_files import stream_lines
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.line_format import LineFormat, translate_lines
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.translator import Translator


@pytest.fixture(scope="module")
def talker():
    return make_talker()


TEXTS = ["Größe für Mädchen", "les élèves français", "tiếng Việt", "한국어 문장", "q\u0323\u0307 x"]
PAIRS = [(text, text.lower()) for text in TEXTS] * 5


@pytest.mark.parametrize("tokenizer", ["bpe", "unigram", "word"])
def test_composed_and_decomposed_text_have_the_same_tokens(tokenizer, tmp_path):
    learned = fmt.train_tokenizers(PAIRS, size=400, tokenizer=tokenizer)
    learned.save(tmp_path)
    loaded = Tokenizers.load(tmp_path).source
    variants = [[unicodedata.normalize(form, text) for text in TEXTS] for form in ("NFC", "NFD")]
    composed, decomposed = map(loaded.encode, variants)
    assert composed == decomposed == learned.source.encode(TEXTS)
    assert loaded.decode(decomposed) == variants[0]
    assert loaded.split(variants[0]) == loaded.split(variants[1])
    if tokenizer != "word":
        assert loaded.sample(variants[0], 1, 0.3) == loaded.sample(variants[1], 1, 0.3)


def test_learning_from_decomposed_text_gives_the_same_vocabulary():
    decomposed = [tuple(unicodedata.normalize("NFD", side) for side in pair) for pair in PAIRS]
    fingerprints = {
        fmt.train_tokenizers(p, size=400).source.fingerprint for p in (PAIRS, decomposed)
    }
    assert len(fingerprints) == 1


def test_compatibility_forms_and_no_normalization():
    text = "\ufb01nd \uff21\uff22"
    for form, expected in (("nfc", text), ("nfkc", "find AB"), ("none", text)):
        vocabulary = fmt.train_tokenizers([*PAIRS], size=600, normalization=form).source
        assert vocabulary.decode(vocabulary.encode([text])) == [expected]
    decomposed = "fu\u0308r"
    assert vocabulary.decode(vocabulary.encode([decomposed])) == [decomposed]


@pytest.mark.parametrize("blank", ["\u200b", "\ufeff", "\0", " \u200b\u00a0\u2060\xad "])
def test_invisible_sides_are_empty(blank):
    corpus = ParallelCorpus([], [], "")
    pair_filter = PairFilter(DataConfig(), corpus)
    assert not pair_filter.keep(1, ("text", blank))
    assert pair_filter.keep(2, ("text", f"{blank}a"))


def test_several_carriage_returns_end_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\r\ntwo\r\n\r\r\nthree\r\r\n")
    assert list(stream_lines(path)) == ["one", "two", "", "three"]


@pytest.mark.slow
@pytest.mark.parametrize("blank", ["\u200b", "\ufeff", "\0", " \u2060\xad\u00a0", "\u202a\u202c"])
def test_invisible_lines_are_empty_lines_in_translation_and_scoring(blank, talker):
    translator, scorer = Translator(*talker.parts), Scorer(*talker.parts)
    assert translator.translate([blank, "ein Hund", ""])[::2] == ["", ""]
    lines = translate_lines(translator, [[blank, ""]], LineFormat(input="jsonl"), "input")
    assert list(lines) == ["", ""]
    scores = [
        scored.log_probability
        for scored in scorer.stream([(blank, "a"), ("", "a"), ("a", blank), ("a", "")])
    ]
    assert scores[::2] == scores[1::2]


@pytest.mark.slow
def test_translations_do_not_depend_on_the_form_of_the_text(talker):
    translator, scorer = Translator(*talker.parts), Scorer(*talker.parts)
    composed = "der Hund läuft über die grüne Wiese"
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert translator.translate([composed]) == translator.translate([decomposed])
    first, second = scorer.stream([(text, text) for text in (composed, decomposed)])
    assert first.log_probability == second.log_probability


@pytest.mark.parametrize("form", ["NFD", "NFC"])
def test_scores_do_not_depend_on_the_form_of_the_references(form):
    hypotheses = ["Größe für Mädchen im Café", "les élèves français", ""]
    references = [unicodedata.normalize(form, text) for text in hypotheses]
    scores = evaluation.evaluate(hypotheses, [*references[:2], "\u200b"])
    assert (scores["bleu"], scores["chrf"], scores["ter"]) == (pytest.approx(100), 100, 0)
    assert scores == evaluation.evaluate([h or "\ufeff" for h in references], hypotheses)
