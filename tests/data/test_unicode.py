"""Unicode normalization of learned vocabularies, and invisible text."""

import unicodedata

import pytest

import flaxformer_mt as fmt
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

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
