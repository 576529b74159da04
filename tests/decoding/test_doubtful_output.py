import pytest

from flaxformer_mt.decoding.doubtful_output import Doubts


@pytest.mark.parametrize(
    ("source", "translation", "kinds"),
    [
        ("Ein Hund bellt.", "A dog barks.", set()),
        ("Ein Hund bellt.", "", {"empty"}),
        ("Ein Hund bellt.", "\u200b ", {"empty"}),
        ("", "", set()),
        ("Ein Hund bellt.", "A dog. . . . .", {"repetitive"}),
        ("Ein Hund bellt.", "A dog......", {"repetitive"}),
        ("Ein Hund bellt.", "A dog dog dog dog", {"repetitive"}),
        ("Ein Hund bellt...", "A dog barks...", set()),
        ("Na ja.......", "Oh well......", set()),
        ("Zehn Millionen", "10,000,000 or 10000000", set()),
        ("--", " ".join("abcdefghijkl"), {"too_long"}),
        ("--", "----" * 24, {"too_long", "repetitive"}),
        ("Ein Hund bellt.", "ein Hund bellt.", {"copied"}),
        ("Berlin", "Berlin", set()),
    ],
)
def test_translations_that_are_none_are_counted(source, translation, kinds):
    doubts = Doubts()
    doubts.add(translation, source)
    assert doubts.counts == dict.fromkeys(kinds, 1)


def test_counts_are_one_line():
    doubts = Doubts()
    for number in range(200):
        text = "" if number < 10 else f"line {number}" + "." * 5 * (number < 20)
        doubts.add(text, None, f"line {number}")
    assert str(doubts) == ("of 200 translations, 10 are empty, 10 end in a run of one token")
    doubts.add("a b", "a b", "a b")
    assert "repeat" not in str(doubts)
