"""Scripts without spaces, told by the text."""

import pytest

from flaxformer_mt.writing_systems import (
    count_words,
    is_boundary,
    is_spaceless,
    is_unsegmented,
    separated,
)

SENTENCES = (
    "これはペンです。", "ｺﾚﾊﾍﾟﾝﾃﾞｽ", "我们今天去北京", "𠮷野家へ行く", "ฉันรักกาแฟ", "ຂ້ອຍມັກກາເຟ",
    "ខ្ញុំចូលចិត្ត",    "ကော်ဖီကြိုက်တယ်", "བོད་སྐད་ཡིན།", "ꦲꦏꦱꦫꦗꦮ", "ꆈꌠꁱꂷꉬꄉ", "ᥖᥭᥰᥖᥬᥳ",
)  # fmt: skip


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences_without_spaces(text):
    assert is_spaceless(text)
    assert is_spaceless(f"{text} OK")
    assert is_unsegmented(text)
    assert is_boundary(text, "a")
    assert is_boundary("a", text)
    assert 1 < count_words(text) < len(text)
    assert "".join(separated(text).split()) == text


@pytest.mark.parametrize(
    "text", ["Ein Hund.", "나는 커피를", "Cà phê", "नमस्ते दुनिया", "ＡＢＣ", "2+2", ""]
)
def test_sentences_with_spaces(text):
    assert not is_spaceless(text)
    assert not is_unsegmented(text)
    assert count_words(text) == len(text.split())
    assert separated(text) == text


def test_segmented_text_is_spaceless_with_words():
    text = "これ は ペン です 。"
    assert is_spaceless(text)
    assert not is_unsegmented(text)
