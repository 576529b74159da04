"""Splitting of long input into segments, and joining of their translations."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.decoding.sentence_splitting import Segment, sentences, separators, split


def count_words(texts):
    """Counts tokens of four characters that do not cross word boundaries."""
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
def test_sentence_boundaries(parts):
    wide = any("\u3000" <= character <= "\u9fff" for character in parts[0])
    text = ("" if wide else " ").join(parts)
    assert [sentence.strip() for sentence in sentences(text)] == parts
    assert "".join(sentences(text)) == text


def test_only_long_sentences_are_split_further():
    text = "Abc def. One two, six ten; one six. Abc abc abc abc abc abc. Abcdefghijkl."
    assert split(text, 4, count_words) == [
        Segment("Abc def."),
        Segment("One two, six ten;"),
        Segment("one six."),
        Segment("Abc abc abc abc"),
        Segment("abc abc."),
        Segment("Abcdefghijkl."),
    ]
    assert split("Abcdefghijkl", 2, count_words) == [
        Segment("Abcdef"),
        Segment("ghijkl", inside_word=True, after_space=False),
    ]


def join(translations, segments):
    parts = zip(separators(translations, segments), translations, strict=True)
    return "".join(itertools.chain(*parts))


def test_translations_are_joined_with_spaces_if_their_script_has_spaces():
    segments = [Segment("One."), Segment("Two."), Segment("Three.")]
    assert join(["Eins.", "", "Drei."], segments) == "Eins. Drei."
    assert join(["一。", "二。", "三。"], segments) == "一。二。三。"
    assert join(["하나.", "둘.", "셋."], segments) == "하나. 둘. 셋."
    assert join(["หนึ่ง", "สอง", "สาม"], segments) == "หนึ่งสองสาม"
    assert (
        join(["Abcd", "efgh"], [Segment("Abcd"), Segment("efgh", inside_word=True)]) == "Abcdefgh"
    )


@given(
    st.text(st.sampled_from("ab.,。、 \u2028'!2字")), st.integers(1, 6), st.sampled_from([1, 3, 10])
)
def test_segments_fit_and_concatenated_are_the_text(text, limit, length):
    text = text * length
    segments = split(text, limit, count_words)
    assert "".join("".join(segment.text for segment in segments).split()) == "".join(text.split())
    for segment, tokens in zip(
        segments, count_words([segment.text for segment in segments]), strict=True
    ):
        assert segment.text.strip() == segment.text != ""
        assert tokens <= limit
    if len(text.split()) > 1:
        assert "".join(join([p.text for p in segments], segments).split()) == "".join(text.split())


@pytest.mark.slow_except("a", ".", ",", ",'")
@pytest.mark.parametrize(
    "unit",
    ["a", "字", ".", ",", ",'", "Das ist gut. ", " ."],
)
def test_the_work_for_a_million_characters_is_linear(unit):
    text = unit * (1_000_000 // len(unit))
    counted = []

    def count_and_note(texts):
        counted.extend(map(len, texts))
        return count_words(texts)

    segments = split(text, 128, count_and_note)
    assert sum(counted) < 10 * len(text)
    assert max(count_words([segment.text for segment in segments])) <= 128
    assert sum(len("".join(segment.text.split())) for segment in segments) == len(
        "".join(text.split())
    )
