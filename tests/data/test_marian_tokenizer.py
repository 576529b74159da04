"""Comparison with Hugging Face's `MarianTokenizer`, on adversarial and on real text."""

import functools
import random
import string
import warnings

import hypothesis
import pytest
from hypothesis import strategies as st
from opus_mt import CODES, train_model, write_tokenizer

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import MarianTokenizer

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=1000), "train")
BPE = {"model_type": "bpe", "byte_fallback": True}
AS_GIVEN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@functools.cache
def models():
    """Returns SentencePiece models of both sides, of different kinds."""
    return train_model(PHRASES.sources, 300), train_model(PHRASES.targets, 500, **BPE, **AS_GIVEN)


VARIANTS = {
    "joint": {},
    "separate": {"separate": True},
    "holes": {"missing": ("\u2581zwei", "ten", "e", "\u2581")},
    "saved by version 4": {
        "clean_up_tokenization_spaces": True,
        "model_max_length": 512,
        "additional_special_tokens": ["<eop>", "Kilo", "Kilometer", "eine"],
        "mask_token": {"__type": "AddedToken", "content": "kg", "lstrip": True, "rstrip": True},
        "added_tokens_decoder": {
            "0": {"content": "</s>", "lstrip": False, "rstrip": False, "special": True},
            "1": {"content": "<unk>", "lstrip": False, "rstrip": False, "special": True},
            "699": {"content": "</s>", "special": True},
            "700": {"content": "<mask>", "lstrip": True, "rstrip": True, "special": True},
            "701": {"content": "eine", "lstrip": True, "special": False},
        },
    },
    "special tokens are text": {"split_special_tokens": True, "bos_token": "<s>"},
    "special tokens with other names": {"eos_token": ">>deu<<", "cls_token": "zwei"},
}


def both(folder, **options):
    """Loads our tokenizers and Hugging Face's from the same folder."""
    write_tokenizer(folder, *models(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It recommends a package that it does not use.
        theirs = MarianTokenizer.from_pretrained(folder)
    return Tokenizers.load(folder), theirs


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    return both(tmp_path_factory.mktemp("opus"), **VARIANTS[request.param])


CHARACTERS = (
    " ", "  ", "\u2581", "\t", "\n", "\r\n", "\0", "\x07", "\x85", "\u00a0", "\u2028", "\u200b",
    "\ufeff", "\u202e", "é", "e\u0301", "ﬁ", "½", "Å", "＜", "＞", "猫", "한국", "🏠", "👩\u200d👧",
    "\U0010ffff", "ß", "İ",
    "</s>", "</s", "<s>", "<unk>", "<pad>", "<mask>", "<eop>", ">>fra<<", ">>deu<<",
    ">>xx<<", ">>", "<<", "<0x41>", "<0xC3>", " .", " ,", " 's", " ' ", "zwei", "eine ", "Kilo",
    "7  eine  7", "Kilometer", " kg ",
)  # fmt: skip


def nasty(count, seed=0):
    """Generates text with special tokens, codes, all kinds of spaces and control characters."""
    draw = random.Random(seed)
    alphabet = (*CHARACTERS, *string.printable, *CODES, *" ".join(PHRASES.sources[:50]).split())
    return ["".join(draw.choices(alphabet, k=draw.randint(0, 12))) for _ in range(count)]


def assert_same(pair, texts):
    """Asserts that both tokenizers encode and decode equally."""
    ours, theirs = pair
    separate = theirs.separate_vocabs
    sources = ours.source.encode(texts)
    targets = ours.target.encode(texts)
    assert sources == theirs(texts, add_special_tokens=False).input_ids
    # With shared ids, the target side must be switched back by hand.
    expected = theirs(text_target=texts, add_special_tokens=False)
    assert targets == expected.input_ids
    assert ours.target.split(texts[:50]) == _as_target(theirs, texts[:50])
    for tokens, text in zip(targets, ours.target.decode(targets), strict=True):
        end = tokens.index(ours.target.eos_id) if ours.target.eos_id in tokens else len(tokens)
        assert text == theirs.decode(tokens[:end], skip_special_tokens=True), tokens
    if not separate:  # Otherwise `MarianTokenizer` cannot decode source ids.
        assert ours.source.decode(targets) == ours.target.decode(targets)


def _as_target(theirs, texts):
    theirs._switch_to_target_mode()
    pieces = [theirs.tokenize(text) for text in texts]
    theirs._switch_to_input_mode()
    return pieces


def test_ids_and_texts_equal_those_of_the_published_tokenizer(pair):
    assert_same(
        pair, ["", *CHARACTERS, *nasty(400), *PHRASES.sources[:100], *PHRASES.targets[:100]]
    )


def test_every_id_decodes_as_in_the_published_tokenizer(pair):
    ours, theirs = pair
    draw = random.Random(1)
    # `MarianTokenizer` cannot decode ids that are neither in the vocabulary nor in SentencePiece.
    pieces = ours.target.pieces(range(ours.target.vocab_size))
    ids = [token for token, piece in enumerate(pieces) if piece]
    sentences = [draw.choices(ids, k=draw.randint(0, 9)) for _ in range(300)]
    sentences += [[token] for token in ids]
    sentences = [[t for t in each if t != ours.target.eos_id] for each in sentences]
    expected = [theirs.decode(sentence, skip_special_tokens=True) for sentence in sentences]
    assert ours.target.decode(sentences) == expected


@hypothesis.given(st.lists(st.text() | st.sampled_from(CHARACTERS)).map("".join))
@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=30
)
def test_any_text(joint, text):
    assert_same(joint, [text])


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    return both(tmp_path_factory.mktemp("joint"))


def test_special_ids(joint, tmp_path):
    ours, theirs = joint
    for side in (ours.source, ours.target):
        assert (side.eos_id, side.unk_id, side.pad_id) == (0, 1, side.vocab_size - 1)
        assert side.bos_id == side.pad_id
        assert side.vocab_size == theirs.vocab_size
        assert side.pieces([2, 3]) == list(CODES)
    assert not ours.joint


def test_a_copy_is_identical(pair, tmp_path):
    ours, _ = pair
    ours.save(tmp_path)
    again = Tokenizers.load(tmp_path)
    assert again.source.files == ours.source.files
    assert again.source.fingerprint == ours.source.fingerprint != ours.target.fingerprint
    assert again.target.fingerprint == ours.target.fingerprint


@pytest.mark.parametrize("amount", [0.1, 0.5])
def test_sampled_segmentations_decode_to_the_same_text(joint, amount):
    ours, theirs = joint
    texts = [">>fra<< " + text for text in PHRASES.targets[:60]]
    sampled = ours.target.sample(texts, 1, amount)
    assert sampled == ours.target.sample(texts, 1, amount)
    assert sampled != ours.target.sample(texts, 2, amount)
    assert sampled != ours.target.encode(texts)
    assert ours.target.decode(sampled) == ours.target.decode(ours.target.encode(texts))
    assert {tokens[0] for tokens in sampled} == {theirs.convert_tokens_to_ids(">>fra<<")}


def test_unknown_text_is_not_sampled(joint):
    ours, _ = joint
    texts = ["twelve 猫 kilometers", "</s> seven"]
    exact = ours.source.encode(texts)
    assert ours.source.sample(texts, 3, 0.5)[0] == exact[0]
    assert ours.source.unk_id in exact[0]
    assert exact[1][0] == ours.source.eos_id


DAMAGES = [
    ("source.spm", b"", "source.spm is not a SentencePiece model: it is empty"),
    ("target.spm", None, "target.spm is missing"),
    ("vocab.json", b'["a"]', "vocab.json is damaged: expected an object"),
    ("tokenizer_config.json", b"{", "tokenizer_config.json is damaged"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGES)
def test_a_damaged_or_missing_file_is_named(name, content, message, tmp_path):
    write_tokenizer(tmp_path, *models())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        Tokenizers.load(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


REJECTED = {
    "sp_model_kwargs is not supported": {"sp_model_kwargs": {"enable_sampling": True}},
    "'<mask>' is single_word": {
        "added_tokens_decoder": {"9": {"content": "<mask>", "single_word": True}}
    },
    "a special token is {'lstrip': True}, not a text": {"mask_token": {"lstrip": True}},
    "vocab.json has no <what>": {"unk_token": "<what>"},
    "it has no pad_token": {"pad_token": None},
    "added_tokens_decoder: expected a string matching": {
        "added_tokens_decoder": {"x": {"content": "<mask>"}}
    },
    "it has more than 10000 added tokens": {
        "extra_special_tokens": [f"<{number}>" for number in range(10_001)]
    },
}


@pytest.mark.parametrize("message", REJECTED)
def test_unsupported_settings_are_rejected(message, tmp_path):
    write_tokenizer(tmp_path, *models(), **REJECTED[message])
    with pytest.raises(UserError) as caught:
        Tokenizers.load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
