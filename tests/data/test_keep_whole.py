"""Vocabularies learned with placeholders, and from text that SentencePiece would leave out."""

import dataclasses
import itertools
import random
import unicodedata

import hypothesis
import pytest
from hypothesis import strategies as st

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import train_sentencepiece
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

WHOLE = ("<URL>", "<NUM>", "@@", "cafe\u0301", "<2fr>")
TEXTS = ["see <URL> and <NUM>. the dog (<URL>)", "dog<NUM>dogs a@@b", "the cafe\u0301 is open"] * 4
CONFIG = DataConfig(
    train_corpora=(CorpusConfig(path="x", tag="<2fr> <bt>"),), keep_whole=WHOLE, vocab_size=330
)


def learned(config):
    return Tokenizers.train([ParallelCorpus(TEXTS, TEXTS, "texts")], config)


VOCABULARIES = {
    (kind, form, joint): learned(
        dataclasses.replace(CONFIG, tokenizer=kind, normalization=form, joint_vocabulary=joint)
    )
    for kind, form, joint in itertools.product(("bpe", "unigram"), ("nfc", "none"), (True, False))
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
@hypothesis.given(
    words=st.lists(st.sampled_from([*WHOLE, "dog", "(", "x", " ", "é", "the "]), max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=30)
def test_placeholders_are_one_token_wherever_they_occur(vocabulary, words, seed):
    tokenizers = VOCABULARIES[vocabulary]
    text = " ".join("".join(words).split())
    for side in (tokenizers.source, tokenizers.target):
        (plain,), (normal,) = side.encode([text]), side.decode(side.encode([text]))
        for tokens in (plain, *side.sample([text], seed, 0.5)[:1]):
            pieces = [piece.removeprefix("\u2581") for piece in side.pieces(tokens)]
            for whole in side.decode(side.encode(WHOLE)):
                # Overlapping placeholders do not occur among WHOLE.
                assert pieces.count(whole) == normal.count(whole)
        tag = side.encode(["<2fr> " + text])[0][0]
        assert side.pieces([tag]) == ["\u2581<2fr>"]


def test_a_vocabulary_of_ones_own_that_splits_placeholders_is_warned_of(tmp_path, caplog):
    learned(dataclasses.replace(CONFIG, keep_whole=("<URL>", "cafe\u0301"))).save(tmp_path)
    given = dataclasses.replace(
        CONFIG, keep_whole=("<URL>", "cafe\u0301", "<NUM>"), tokenizer_path=str(tmp_path)
    )
    Tokenizers.for_run([], given)
    assert {line.split(" is ")[0] for line in caplog.messages} == {"data.keep_whole: <NUM>"}
    no_bytes = dataclasses.replace(CONFIG, keep_whole=(), byte_fallback=False)
    learned(no_bytes).save(tmp_path / "characters")
    given = dataclasses.replace(given, keep_whole=("☃",), tokenizer_path=f"{tmp_path}/characters")
    with pytest.raises(UserError, match=r"data\.keep_whole: ☃ is unknown in the vocabulary"):
        Tokenizers.for_run([], given)


@pytest.mark.parametrize("text", ["", "a b", "<s>", "<pad>", "<0x0A>", "\u2581x", " x"])
def test_what_cannot_be_kept_whole_is_refused(text):
    with pytest.raises(UserError, match=r"data\.keep_whole.*must be texts without spaces"):
        DataConfig(keep_whole=("<URL>", text))
    with pytest.raises(UserError, match=r"data\.keep_whole.* has no effect with data.tokenizer=w"):
        DataConfig(keep_whole=("<URL>",), tokenizer="word")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_no_line_is_left_out(kind):
    # NFC doubles the bytes of U+0958; SentencePiece learns nothing from a text with U+2585.
    letters = [chr(0x958 + number) for number in range(8)]
    words = ["".join(word) for word in itertools.product(letters, repeat=3)]
    drawn = " ".join(random.Random(0).choices(words, k=90_000))
    texts = ["plain text", f"longest {drawn}", "\u2585 symbol"]
    assert len(texts[1].encode()) < 2**20 < len(unicodedata.normalize("NFC", texts[1]).encode())
    tokenizer = train_sentencepiece(texts, DataConfig(tokenizer=kind, byte_fallback=False))
    (tokens,) = tokenizer.encode(["longest symbol plain text"])
    assert tokenizer.unk_id not in tokens
