import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.filters import (
    PairFilter,
    is_mostly_in,
    script_words,
)
from flaxformer_mt.data.corpora.rows import Dropped
from flaxformer_mt.errors import UserError


def corpus_of(*pairs, languages=("en", "de"), tag=""):
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return ParallelCorpus(sources, targets, "a corpus", languages, tag)


def run_filter(corpus, *, has_inputs=True, **options):
    """Returns the kept pairs and the filter."""
    chosen = PairFilter(DataConfig(**options), corpus, has_inputs)
    kept = [
        pair for number, pair in enumerate(corpus.pairs(), start=1) if chosen.keep(number, pair)
    ]
    return kept, chosen


@pytest.mark.parametrize(
    ("options", "source", "target", "reason"),
    [
        ({}, "a", "b", None),
        ({}, "a", " \u2003 ", "empty side"),
        ({"max_words": 3}, "a", "a b c d", "more than 3 words"),
        ({"max_length_ratio": 2.0}, "a b c", "a", "length ratio above 2"),
        ({"max_words": 3}, "a b c", "これはペンです。", "more than 3 words"),
        ({"max_length_ratio": 2.0}, "this is a good pen", "これはとても良いペンです。", None),
        ({"max_length_ratio": 2.0}, "this is", "ฉันรักกาแฟมากมายเหลือเกินทุกวัน", "length ratio above 2"),
        ({"drop_identical": True}, "Berlin", "Berlin!", None),
        ({"drop_identical": True}, "Berlin", " Berlin", "identical sides"),
        ({"drop_wrong_script": True}, "Moscow (Москва)", "Moskau (Москва)", None),
        ({"drop_wrong_script": True}, "Moscow", "Москва", "wrong script"),
    ],
)
def test_one_pair(options, source, target, reason):
    kept, chosen = run_filter(corpus_of((source, target)), **options)
    assert list(chosen.dropped) == ([reason] if reason else [])
    assert kept == ([] if reason else [(source, target)])


def test_reasons_are_counted_with_their_first_example():
    corpus = corpus_of(("a", "b"), ("", "b"), ("b" * 70, "b c d"), ("c", ""))
    kept, chosen = run_filter(corpus, max_length_ratio=2)
    assert kept == [("a", "b")]
    assert chosen.dropped == {
        "empty side": Dropped(2, "pair 2:  | b"),
        "length ratio above 2": Dropped(1, f"pair 3: {'b' * 60}... | b c d"),
    }


def test_a_tag_is_not_text():
    corpus = corpus_of(
        ("<2de> <news> ", "b"), ("<2de> <news> Berlin", "Berlin"), tag="<2de> <news>"
    )
    kept, chosen = run_filter(corpus, drop_identical=True, max_words=1)
    assert kept == []
    assert list(chosen.dropped) == ["empty side", "identical sides"]
    assert chosen.dropped["identical sides"].example == "pair 2: Berlin | Berlin"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("de", "Häuser ﬁnden"),
        ("ru", "дома"),
        ("sr", "куће"),
        ("sr_Latn", "kuće"),
        ("zh", "房子"),
        ("ja", "ラーメンを食べる"),
        ("en", "Ｈｅｌｌｏ"),
        ("ko", "집들"),
        ("hi", "मकान"),
        ("ar", "بيوت"),
        ("th", "บ้าน"),
    ],
)
def test_languages_and_their_scripts(language, text):
    assert is_mostly_in(script_words(language), text)
    assert not is_mostly_in(script_words("hy"), text)


@pytest.mark.parametrize("language", ["digits", "xx", ""])
def test_a_language_without_a_known_script(language):
    corpus = corpus_of(("a", "b"), languages=("en", language))
    with pytest.raises(UserError, match=rf"drop_wrong_script: the script of language '{language}'"):
        run_filter(corpus, drop_wrong_script=True)


FRENCH = "La petite maison se trouve au bord de la rivière."
GERMAN = "Das kleine Haus steht am Ufer des Flusses."


@pytest.mark.parametrize(
    ("languages", "source", "target", "is_kept"),
    [
        (("fr", "de"), FRENCH, GERMAN, True),
        (("fr", "de"), FRENCH, FRENCH, False),
        (("fra", "de-AT"), FRENCH, GERMAN, True),
        (("fr", "de"), "Oui, merci.", "Oui, merci.", True),  # Too short.
        (("fr", "de"), FRENCH, "12 345 678 901 234 567 890 123 456 789", True),
        (("fr", "xx"), FRENCH, FRENCH, True),  # Unknown.
        (("ja", "zh"), "これはとても大きな家です。", "这是一座非常大的房子。", True),
    ],
)
def test_the_filter_of_languages(languages, source, target, is_kept):
    pairs = corpus_of((source, target), languages=languages)
    _, chosen = run_filter(pairs, drop_wrong_language=0.7)
    assert list(chosen.dropped) == ([] if is_kept else ["wrong language"])
    assert run_filter(pairs)[0] == [(source, target)]
