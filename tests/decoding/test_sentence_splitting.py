"""Long input in pieces: where it is divided, and what must hold of any text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.decoding.sentence_splitting import Piece, join, sentences, split


def count_words(texts):
    """As a tokenizer whose tokens are words, and parts of four characters of long ones."""
    return [sum(-(-len(word) // 4) for word in text.split()) for text in texts]


@pytest.mark.parametrize(
    "parts",
    [
        ["One.", "Two!", "Three?", "Four…", "Five"],
        ["Really?!", "Well ... perhaps.", "No."],
        ["Yes.", "... . ! But why?", "..."],
        ["He paid 3.14 dollars.", "Version 2.0.1 is out."],
        ["Dr. Smith and Mrs. Jones met J. R. Tolkien.", "All went well."],
        ["Am 3. Mai kam er z. B. mit ca. 20 Leuten.", "Dann ging er."],
        ["We saw birds, e.g. some ducks.", "Also etc. and so on."],
        ['"Go!"', "(She went.)", "„Gut.“", "« Oui. »", "“Yes.”", "End."],
        ["今天天气好。", "明天呢？", "「走吧！」", "好"],
        ["यह अच्छा है।", "हाँ।"],
        ["ما هذا؟", "كتاب."],
        ["Это 1995 г. и не более.", "Да."],
    ],
)
def test_sentences_end_where_a_reader_ends_them(parts):
    wide = any("\u3000" <= character <= "\u9fff" for character in parts[0])
    text = ("" if wide else " ").join(parts)
    assert [sentence.strip() for sentence in sentences(text)] == parts
    assert "".join(sentences(text)) == text


def test_line_separators_end_sentences():
    assert split("a b\u2028c d\x0ce f", 2, count_words) == [
        Piece("a b"),
        Piece("c d"),
        Piece("e f"),
    ]


def test_only_what_is_too_long_is_divided_further():
    text = "Abc def. One two, six ten; one six. Abc abc abc abc abc abc. Abcdefghijkl."
    assert split(text, 4, count_words) == [
        Piece("Abc def."),
        Piece("One two, six ten;"),
        Piece("one six."),
        Piece("Abc abc abc abc"),
        Piece("abc abc."),
        Piece("Abcdefghijkl."),
    ]
    assert split("Abcdefghijkl", 2, count_words) == [
        Piece("Abcdef"),
        Piece("ghijkl", inside_word=True),
    ]


def test_translations_are_joined_with_spaces_where_their_script_has_them():
    pieces = [Piece("One."), Piece("Two."), Piece("Three.")]
    assert join(["Eins.", "", "Drei."], pieces) == "Eins. Drei."
    assert join(["一。", "二。", "三。"], pieces) == "一。二。三。"
    assert join(["하나.", "둘.", "셋."], pieces) == "하나. 둘. 셋."
    assert join(["หนึ่ง", "สอง", "สาม"], pieces) == "หนึ่งสองสาม"
    assert join(["Abcd", "efgh"], [Piece("Abcd"), Piece("efgh", inside_word=True)]) == "Abcdefgh"


@given(
    st.text(st.sampled_from("ab.,。、 \u2028'!2字")), st.integers(1, 6), st.sampled_from([1, 3, 10])
)
def test_pieces_fit_and_together_are_the_text(text, limit, length):
    text = text * length
    pieces = split(text, limit, count_words)
    assert "".join("".join(piece.text for piece in pieces).split()) == "".join(text.split())
    for piece, tokens in zip(pieces, count_words([piece.text for piece in pieces]), strict=True):
        assert piece.text.strip() == piece.text != ""
        assert tokens <= limit
    if len(text.split()) > 1:
        assert "".join(join([p.text for p in pieces], pieces).split()) == "".join(text.split())


@pytest.mark.parametrize(
    "unit",
    ["a", "字", ".", ",", ",'", "Das ist gut. ", " ."],
)
def test_a_million_characters_take_seconds(unit):
    text = unit * (1_000_000 // len(unit))
    start = time.process_time()
    pieces = split(text, 128, count_words)
    assert time.process_time() - start < 10
    assert max(count_words([piece.text for piece in pieces])) <= 128
    assert sum(len("".join(piece.text.split())) for piece in pieces) == len("".join(text.split()))
