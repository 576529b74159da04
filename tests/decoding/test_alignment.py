"""Word alignment, from hand-made attention and from a model that copies."""

import random

import jax
import numpy as np
import pytest
from talker import padded, with_decode

from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.decoding.scoring.alignment import (
    align,
    align_words,
    aligned_words,
    copy_unknown,
    pharaoh,
    printed_words,
    without_ends,
    words,
)
from flaxformer_mt.decoding.scoring.teacher_forcing import teacher_force
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.writing_systems import spaced_words

# "the big dog" in four pieces, "der Hund" in three.
SOURCE_PIECES = ["▁the", "▁b", "ig", "▁dog"]
TARGET_PIECES = ["▁der", "▁Hu", "nd"]
ATTENTION = np.array(
    [
        [0.4, 0.3, 0.2, 0.1],
        [0.1, 0.35, 0.0, 0.4],
        [0.1, 0.0, 0.3, 0.5],
    ],
    np.float32,
)


def test_tokens_are_linked_to_what_they_attend_to_most():
    assert align(ATTENTION) == [(0, 0), (3, 1), (3, 2)]
    assert pharaoh(align(ATTENTION)) == "0-0 3-1 3-2"
    assert align(np.zeros((2, 0))) == []
    assert pharaoh(align(np.zeros((0, 2)))) == ""


def test_words_attend_as_the_mean_of_their_pieces_and_receive_the_sum():
    # der: 0.4 to "the", but 0.3 + 0.2 to "big". Hund: 0.325 to "big", 0.45 to "dog".
    source, target = words(SOURCE_PIECES), words(TARGET_PIECES)
    assert align_words(ATTENTION, source, target) == [(1, 0), (2, 1)]
    assert align_words(np.zeros((0, 4)), source, []) == []
    assert align_words(np.zeros((3, 0)), [], target) == []
    # A word of no token has no link, and gets none.
    assert align_words(ATTENTION, [0, 2, 2, 3], [0, 2, 2]) == [(2, 0), (3, 2)]
    assert align_words(ATTENTION, [-1, 0, 0, 1], [0, 1, 1]) == [(0, 0), (1, 1)]


def test_words_start_with_a_space_or_the_text():
    assert words(SOURCE_PIECES) == [0, 1, 1, 2]
    assert words([">>fra<<", "▁a", SPACE, "<0xE2>", "<0x98>", "▁b"]) == [0, 1, 2, 2, 2, 3]
    assert words([]) == []


@pytest.mark.parametrize(
    ("pieces", "groups"),
    [
        (["▁これ", "は", "ペン", "です", "。"], [0, 1, 2, 3, 4]),
        (["▁", "ฉัน", "รัก", "กาแฟ"], [0, 0, 1, 2]),
        (["▁我们", "今天早上去喝", "▁c", "af", "é", "很好的咖啡"], [0, 1, 2, 2, 2, 3]),
        (["▁これ", "▁は", "▁ペ", "ン"], [0, 1, 2, 2]),  # Segmented text has words.
        (["▁a", "b", "▁これ"], [0, 0, 1]),
        (SOURCE_PIECES, [0, 1, 1, 2]),
        ([], []),
    ],
)
def test_pieces_are_words_where_no_spaces_separate_them(pieces, groups):
    assert aligned_words(pieces) == groups


def test_end_tokens_are_removed():
    attention = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(
        without_ends(attention, (4, 5, 6), (7, 8, 2), 2), attention[:2, :3]
    )
    np.testing.assert_array_equal(
        without_ends(attention, (4, 5, 6), (7, 8, 9), 2), attention[:, :3]
    )
    assert without_ends(np.zeros((0, 4)), (4, 5, 6), (), 2).shape == (0, 3)


class Vocabulary:
    """A minimal tokenizer with an unknown token."""

    unk_id = 0
    entries = ("<unk>", "▁der", "▁Hu", "nd", ".")

    def pieces(self, tokens):
        return [self.entries[token] for token in tokens]

    def decode(self, sequences):
        return ["".join(self.pieces(s)).replace(SPACE, " ").strip() for s in sequences]


@pytest.mark.parametrize(
    ("target", "attended", "text"),
    [
        ((1, 2, 3), (0, 1, 1), "der Hund"),
        ((1, 0), (0, 1), "der big"),  # both pieces of "big" together
        ((1, 0, 0, 4), (0, 1, 2, 3), "der big."),  # an unknown word is often several tokens
        ((0, 0, 2, 3), (0, 3, 0, 0), "the dog Hund"),
        ((0,), (3,), "dog"),
        ((), (), ""),
    ],
)
def test_unknown_tokens_become_the_word_that_they_attend_to(target, attended, text):
    attention = np.eye(4)[list(attended)] if attended else np.zeros((0, 4))
    assert copy_unknown(target, attention, SOURCE_PIECES, Vocabulary()) == text


def test_unknown_tokens_become_pieces_where_no_spaces_separate_words():
    pieces = ["▁これ", "は", "ペン", "です"]
    assert copy_unknown((0, 0), np.eye(4)[[0, 2]], pieces, Vocabulary()) == "これペン"


def test_without_a_source_word_unknown_tokens_stay():
    assert copy_unknown((1, 0), np.zeros((2, 0)), [], Vocabulary()) == "der<unk>"


def test_attention_is_that_of_the_full_model(talker):
    source = [*talker.tokenizers.source.encode(["ein Hund bellt"])[0], talker.model.eos_id]
    target = [*talker.tokenizers.source.encode(["die Wiese"])[0], talker.model.eos_id]
    (found,) = teacher_force(
        talker.params, talker.model, talker.config.decode, [source], [target], attention=True
    )
    apply = jax.jit(Transformer(talker.model).apply, static_argnames="return_attention")
    inputs = padded([talker.model.bos_id, *target[:-1]])
    _, weights = apply({"params": talker.params}, padded(source), inputs, return_attention=True)
    expected = weights.decoder_cross[-1, 0].mean(axis=0)[: len(target), : len(source)]
    np.testing.assert_allclose(found.attention, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.attention.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment_layer": 1}, "decode.alignment_layer=1: the decoder has 1 layers"),
        ({"alignment_layer": -2}, "decode.alignment_layer=-2"),
        ({"alignment_head": 2}, "decode.alignment_head=2: the decoder has 2 heads"),
        ({"alignment_head": -2}, "decode.alignment_head=-2"),
    ],
)
def test_layers_and_heads_that_do_not_exist_are_rejected(talker, options, message):
    def align():
        decode = with_decode(talker, **options).config.decode  # The option itself excludes -2.
        teacher_force(talker.params, talker.model, decode, [[5, 2]], [[5, 2]], attention=True)

    with pytest.raises(UserError, match=message):
        align()


def test_links_of_translations_are_of_the_words_that_are_printed(talker):
    assert printed_words(["", "a", "a ", "a b", "a b"], "a b") == [0, 0, 0, 1, 1]
    rng = random.Random(0)
    spaces = "\u00a0\u202f\u3000\u200b\x85   "
    texts = [
        "".join(f"{word}{rng.choice(spaces)}" for word in rng.choices(["Hund", "10", "die"], k=5))
        for _ in range(20)
    ]
    found = Translator(*talker.parts).translate_n_best(texts, 3, beam_size=3, unit="words")
    for text, hypotheses in zip(texts, found, strict=True):
        sources = len(spaced_words(text.strip()))
        for hypothesis in hypotheses:
            targets = len(spaced_words(hypothesis.text))
            assert all(s < sources and t < targets for s, t in hypothesis.alignment)
