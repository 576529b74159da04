import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus, open_corpora
from flaxformer_mt.data.corpora.entities import notes_of, unescaped, warn_of_notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("&quot;a&quot; &amp;amp; &#39;b&#x27;", "\"a\" & 'b'"),
        ("&amp;amp;quot;", '"'),
        ("a&#10;b&#9;c&#13;&#10;d", "a b c  d"),
        ("AT&T; R&D &copy=2 & &; &unknown; \u201ccurly\u201d",) * 2,
    ],
)
def test_entities_are_replaced(text, expected):
    assert unescaped(text) == unescaped(expected) == expected


def test_text_is_unescaped_by_an_option_and_warned_of_otherwise(tmp_path, caplog):
    file = tmp_path / "a.tsv"
    file.write_text("one\teins\n&quot;x&quot;\ty\n\u201cz\u201d\tR&amp;amp;D\nR&D\tw\n")
    plain = DataConfig(path=str(file))
    config = DataConfig(path=str(file), unescape_html=True)
    assert load_corpus(config, "").sources == ["one", '"x"', "\u201cz\u201d", "R&D"]
    assert load_corpus(config, "").targets == ["eins", "y", "R&D", "w"]
    given, other = open_corpora(plain, "train")[0], open_corpora(config, "train")[0]
    assert given.fingerprint != other.fingerprint
    for corpus in (other, given):
        assert not caplog.messages
        warn_of_notes("a", notes_of(corpus.pairs()))
    assert caplog.messages == [
        f"a: 2 pairs have HTML entities, such as &quot;, the first at {file}, line 2; {file}, "
        "line 3: data.unescape_html=True replaces them by their characters"
    ]


def test_sides_that_stand_for_a_missing_text_are_counted(caplog):
    pairs = [("a sentence", "ein Satz"), ("-", "-"), ("None", "none ")]
    warn_of_notes("a", notes_of([*pairs, ("Aucun", "None")] * 4))
    assert not caplog.messages
    missing = [("one", "NULL"), ("two", " nan"), ("n/a", "drei"), ("four", "-"), ("five", "#N/A")]
    warn_of_notes("a", notes_of([*pairs, *missing]))
    (message,) = caplog.messages
    assert message.startswith(
        "a: 5 pairs have a side that stands for a missing text, such as NULL,"
    )
    assert "the first at pair 4; pair 5" in message
