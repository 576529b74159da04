import dataclasses
import itertools
import logging
import threading
import unicodedata

import hypothesis
import pytest
from hypothesis import strategies as st

from flaxformer_mt.config import CorpusConfig, DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.tokenizers import tokenizer as tokenizer_module
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import train_sentencepiece
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, evenly, words
from flaxformer_mt.errors import UserError

CONFIG = DataConfig(corpus="phrases", target_language="fr", generated_pairs=500, vocab_size=500)
CORPUS = load_corpus(CONFIG, "train")
TRAINED = Tokenizers.train([CORPUS], CONFIG)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_decoding_inverts_encoding(kind):
    tokenizer = Tokenizers.train([CORPUS], dataclasses.replace(CONFIG, tokenizer=kind)).target
    texts = [*CORPUS.targets, "ﬁ ½ … “Tea”\u00a0!", "日本語 🏠 \u2028 \t", "<s> </s> <pad>", ""]
    assert tokenizer.decode(tokenizer.encode(texts)) == texts


@hypothesis.given(st.text())
def test_any_text_round_trips_except_for_spaces(text):
    # SentencePiece's symbol for a space is the only character that is confused with it.
    text = unicodedata.normalize("NFC", text.replace("\u2581", " "))
    (decoded,) = TRAINED.source.decode(TRAINED.source.encode([text]))
    assert decoded == " ".join(word for word in text.split(" ") if word)


def test_encoding_adds_no_special_ids_and_decoding_skips_them():
    tokenizer = TRAINED.source
    (tokens,) = tokenizer.encode(["twelve kilometers"])
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(tokens)
    framed = [tokenizer.bos_id, *tokens, tokenizer.eos_id, *tokens, tokenizer.pad_id]
    padded = [*tokens, tokenizer.pad_id, tokenizer.pad_id]
    assert tokenizer.decode([framed, padded, []]) == ["twelve kilometers", "twelve kilometers", ""]


def test_without_byte_fallback_there_are_unknown_tokens():
    config = dataclasses.replace(CONFIG, byte_fallback=False)
    tokenizer = Tokenizers.train([CORPUS], config).source
    assert tokenizer.unk_id in tokenizer.encode(["猫"])[0]
    assert TRAINED.source.unk_id not in TRAINED.source.encode(["猫"])[0]


def test_training_is_reproducible():
    again = Tokenizers.train([CORPUS], CONFIG)
    assert again.source.fingerprint == TRAINED.source.fingerprint
    assert len(again.source.fingerprint) == 64


def test_joint_and_separate_vocabularies(tmp_path):
    separate = Tokenizers.train([CORPUS], dataclasses.replace(CONFIG, joint_vocabulary=False))
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
        tokenizers = Tokenizers.train([ParallelCorpus(texts, texts, "small")], config)
    assert tokenizers.source.vocab_size < 300
    assert "fewer than data.vocab_size=10000" in caplog.text
    assert tokenizers.source.decode(tokenizers.source.encode(texts)) == texts


def test_words_that_are_segmented_already_are_one_token_each():
    texts = ["a play@@ house , t-shirt", "d&apos; un compound@@ compound@@ compound@@ s 3.14"]
    config = DataConfig(tokenizer="word")
    tokenizer = Tokenizers.train([ParallelCorpus(texts, texts, "words")], config).source
    words = {word for text in texts for word in text.split()}
    assert tokenizer.vocab_size == 4 + len(words)
    assert tokenizer.split(texts) == [[f"\u2581{word}" for word in text.split()] for text in texts]
    assert tokenizer.decode(tokenizer.encode(texts)) == texts
    a, unknown = tokenizer.encode(["a"])[0], tokenizer.unk_id
    assert tokenizer.encode(["a zebra", "a b c a"]) == [[*a, unknown], [*a, unknown, unknown, *a]]
    assert tokenizer.split(["a b c a"]) == [["\u2581a", "\u2581b", "\u2581c", "\u2581a"]]
    with pytest.raises(UserError, match=r"data.subword_sampling needs .*, not one of kind WORD"):
        tokenizer.sample(texts, 0, 0.1)


def test_vocabulary_smaller_than_the_number_of_characters():
    with pytest.raises(UserError, match=r"=50 pieces: the characters of the text alone are \d+"):
        Tokenizers.train([CORPUS], dataclasses.replace(CONFIG, vocab_size=50))


def test_missing_and_damaged_models(tmp_path):
    with pytest.raises(UserError, match=r"source\.model is missing"):
        Tokenizers.load(tmp_path)
    (tmp_path / "joint.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"joint\.model is not a SentencePiece model"):
        Tokenizers.load(tmp_path)


def test_a_language_model_learns_from_its_targets():
    blank = dataclasses.replace(CORPUS, sources=[""] * len(CORPUS))
    tokenizers = Tokenizers.train([blank], CONFIG, has_inputs=False)
    separate = Tokenizers.train([CORPUS], dataclasses.replace(CONFIG, joint_vocabulary=False))
    assert tokenizers.joint
    assert tokenizers.target.fingerprint == separate.target.fingerprint


@pytest.mark.parametrize(
    ("limit", "taken"),
    [(10, range(10)), (9, range(0, 10, 2)), (5, range(0, 10, 2)), (4, range(0, 10, 4))],
)
def test_vocabularies_are_learned_from_evenly_spaced_pairs(limit, taken):
    assert evenly(iter(range(10)), limit) == list(taken)


def test_the_number_of_training_pairs_of_a_vocabulary_is_limited(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_TRAINING_PAIRS", 250)
    every_second = ParallelCorpus(CORPUS.sources[::2], CORPUS.targets[::2], "half")
    limited = Tokenizers.train([CORPUS], CONFIG)
    assert limited.source.fingerprint == Tokenizers.train([every_second], CONFIG).source.fingerprint


TAGGED = dataclasses.replace(
    CONFIG, train_corpora=(CorpusConfig(tag="<2fr> <bt>"), CorpusConfig(tag="<2fr>"))
)


def tagged_tokenizer(kind, joint=True):
    config = dataclasses.replace(TAGGED, tokenizer=kind, joint_vocabulary=joint)
    sources = [f"<2fr> <bt> {source}" for source in CORPUS.sources]
    return Tokenizers.train([ParallelCorpus(sources, CORPUS.targets, "tagged")], config)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tags_are_one_piece_each_and_never_split(kind):
    tokenizer = tagged_tokenizer(kind).source
    tag, both, text = tokenizer.encode(["<2fr>", "<2fr> <bt>", "<2fr> <bt> twelve kilometers"])
    assert (len(tag), len(both)) == (1, 2)
    assert text[:2] == both
    assert tokenizer.decode([text]) == ["<2fr> <bt> twelve kilometers"]
    for amount, seed in itertools.product((0.1, 0.9), range(50)):
        (sampled,) = tokenizer.sample(["<2fr> <bt> twelve kilometers"], seed, amount)
        assert sampled[:2] == both


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sampled_segmentations_decode_to_the_text(kind):
    config = dataclasses.replace(CONFIG, tokenizer=kind)
    tokenizer = Tokenizers.train([CORPUS], config).source
    (text,) = CORPUS.sources[:1]
    splits = [tokenizer.sample([text], seed, 0.3)[0] for seed in range(20)]
    assert len(set(map(tuple, splits))) > 5
    assert set(tokenizer.decode(splits)) == {text}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sampling_only_depends_on_the_seed(kind):
    config = dataclasses.replace(CONFIG, tokenizer=kind)
    tokenizer = Tokenizers.train([CORPUS], config).source
    texts = CORPUS.sources[:50]
    wanted = [tokenizer.sample(texts, seed, 0.2) for seed in range(4)]
    assert wanted[0] != wanted[1]
    results = {}

    def sample(seed):
        results[seed] = [tokenizer.sample(texts, seed, 0.2) for _ in range(20)]

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[seed] == [wanted[seed]] * 20 for seed in range(4))


def test_a_vocabulary_without_the_tags(tmp_path, caplog):
    TRAINED.save(tmp_path)
    Tokenizers.for_run([], dataclasses.replace(TAGGED, tokenizer_path=str(tmp_path)))
    assert [line[:13] for line in caplog.messages] == ["the tag <2fr>", "the tag <bt> "]
    words = dataclasses.replace(CONFIG, tokenizer="word")
    Tokenizers.train([CORPUS], words).save(tmp_path / "words")
    config = dataclasses.replace(TAGGED, tokenizer_path=str(tmp_path / "words"))
    with pytest.raises(UserError, match="the tag <2fr> is unknown in the vocabulary"):
        Tokenizers.for_run([], config)


@hypothesis.given(
    st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["nfc", "none"])
)
def test_bytes_are_tokens_of_any_text(text, normalization):
    config = DataConfig(tokenizer="bytes", normalization=normalization, keep_whole=("<URL>",))
    tokenizer = train_sentencepiece([], config, ["<2de>"])
    assert tokenizer.vocab_size == 4 + 256 + 2
    normal = unicodedata.normalize("NFC", text) if normalization == "nfc" else text
    (tokens,) = tokenizer.encode([text])
    assert tokens == [4 + byte for byte in normal.encode()]
    assert tokenizer.decode([tokens]) == [normal]
    (tagged,) = tokenizer.encode([f"<2de> {text}<URL>"])
    assert (tagged[0], tagged[-1]) == (260, 261)


def test_words_of_bytes_begin_with_spaces(tmp_path):
    tokenizers = Tokenizers.train([], DataConfig(tokenizer="bytes"))
    tokenizers.save(tmp_path)
    tokenizer = Tokenizers.load(tmp_path).source
    assert tokenizer.fingerprint == tokenizers.target.fingerprint
    (pieces,) = tokenizer.split(["a né"])
    assert pieces == ["a", "▁", "n", "<0xC3>", "<0xA9>"]
    assert words(pieces) == [0, 1, 1, 1, 1]
    assert tokenizer.pieces(tokenizer.encode(["a né"])[0]) == pieces
    with pytest.raises(
        UserError, match=r"subword_sampling=0.1 needs data.tokenizer=bpe or unigram"
    ):
        DataConfig(tokenizer="bytes", subword_sampling=0.1)
