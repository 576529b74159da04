import dataclasses
import logging

import hypothesis
import pytest
from hypothesis import strategies as st

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

CONFIG = DataConfig(corpus="phrases", target_language="fr", generated_pairs=500, vocab_size=500)
CORPUS = load_corpus(CONFIG, "train")
TRAINED = Tokenizers.train(CORPUS, CONFIG)


def test_special_ids():
    tokenizer = TRAINED.source
    ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id)
    assert ids == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 500


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_decoding_gives_the_text_back(kind):
    tokenizer = Tokenizers.train(CORPUS, dataclasses.replace(CONFIG, tokenizer=kind)).target
    texts = [*CORPUS.targets, "ﬁ ½ … “Tea”\u00a0!", "日本語 🏠 \u2028 \t", "<s> </s> <pad>", ""]
    assert tokenizer.decode(tokenizer.encode(texts)) == texts


@hypothesis.given(st.text())
def test_any_text_comes_back_but_for_its_spaces(text):
    # SentencePiece's own sign for a space is the one character that cannot be told from it.
    text = text.replace("\u2581", " ")
    (decoded,) = TRAINED.source.decode(TRAINED.source.encode([text]))
    assert decoded == " ".join(word for word in text.split(" ") if word)


def test_encoding_has_no_special_ids_and_decoding_passes_over_them():
    tokenizer = TRAINED.source
    (tokens,) = tokenizer.encode(["twelve kilometers"])
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(tokens)
    framed = [tokenizer.bos_id, *tokens, tokenizer.eos_id, *tokens, tokenizer.pad_id]
    padded = [*tokens, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode([framed, padded, []]) == ["twelve kilometers", "twelve kilometers", ""]


def test_without_byte_fallback_there_are_unknown_tokens():
    config = dataclasses.replace(CONFIG, byte_fallback=False)
    tokenizer = Tokenizers.train(CORPUS, config).source
    assert tokenizer.unk_id in tokenizer.encode(["猫"])[0]
    assert TRAINED.source.unk_id not in TRAINED.source.encode(["猫"])[0]


def test_training_is_reproducible():
    again = Tokenizers.train(CORPUS, CONFIG)
    assert again.source.fingerprint == TRAINED.source.fingerprint
    assert len(again.source.fingerprint) == 64


def test_joint_and_separate_vocabularies(tmp_path):
    separate = Tokenizers.train(CORPUS, dataclasses.replace(CONFIG, joint_vocabulary=False))
    assert TRAINED.joint
    assert not separate.joint
    assert separate.source.fingerprint != separate.target.fingerprint
    for name, tokenizers in {"joint": TRAINED, "separate": separate}.items():
        tokenizers.save(tmp_path / name)
        loaded = Tokenizers.load(tmp_path / name)
        assert loaded.joint == tokenizers.joint
        assert loaded.source.fingerprint == tokenizers.source.fingerprint
        assert loaded.target.fingerprint == tokenizers.target.fingerprint
    assert [path.name for path in (tmp_path / "joint").iterdir()] == ["joint.model"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("texts", [["a"], ["3 1 4", "1 5"], ["same words"] * 50, ["", "猫"]])
def test_small_corpora_get_fewer_pieces(kind, texts, caplog):
    config = DataConfig(tokenizer=kind, vocab_size=10_000)
    with caplog.at_level(logging.INFO):
        tokenizers = Tokenizers.train(ParallelCorpus(texts, texts, "small"), config)
    assert tokenizers.source.vocab_size < 300
    assert "fewer than data.vocab_size=10000" in caplog.text
    assert tokenizers.source.decode(tokenizers.source.encode(texts)) == texts


def test_digits_parted_by_spaces_are_one_piece_each():
    corpus = load_corpus(DataConfig(corpus="reverse", generated_pairs=200), "train")
    tokenizer = Tokenizers.train(corpus, DataConfig()).source
    assert [len(tokens) for tokens in tokenizer.encode(["7", "1 2 3 4"])] == [1, 4]


def test_vocabulary_without_room_for_the_characters():
    with pytest.raises(UserError, match=r"data\.vocab_size=50 pieces: Vocabulary size is smaller"):
        Tokenizers.train(CORPUS, dataclasses.replace(CONFIG, vocab_size=50))


def test_corpus_without_text():
    with pytest.raises(UserError, match="no text to learn"):
        Tokenizers.train(ParallelCorpus(["", " "], ["", " "], "blank"), CONFIG)


def test_missing_and_damaged_models(tmp_path):
    with pytest.raises(UserError, match=r"source\.model is missing"):
        Tokenizers.load(tmp_path)
    (tmp_path / "joint.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"joint\.model is not a SentencePiece model"):
        Tokenizers.load(tmp_path)
