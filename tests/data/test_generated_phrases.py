import datetime
import random
import re
from decimal import Decimal

import pytest

from flaxformer_mt.data.corpora import generated_phrases

ENGLISH, GERMAN, FRENCH = (generated_phrases.Language(code) for code in ("en", "de", "fr"))
SPRING = datetime.date(2025, 3, 3)


@pytest.mark.parametrize(
    ("say", "english", "german", "french"),
    [
        (lambda at: at.cardinal(97), "ninety-seven", "siebenundneunzig", "quatre-vingt-dix-sept"),
        (lambda at: at.ordinal(21), "twenty-first", "einundzwanzigste", "vingt et unième"),
        (lambda at: at.percentage(Decimal("12.5")), "12.5%", "12,5 %", "12,5 %"),
        (
            lambda at: at.quantity(12, "length-kilometer"),
            "twelve kilometers",
            "zwölf Kilometer",
            "douze kilomètres",
        ),
        (lambda at: at.money(5, "CHF"), "five Swiss francs", "fünf Schweizer Franken",
         "cinq francs suisses"),
        (lambda at: at.date(SPRING, "full"), "Monday, March 3, 2025", "Montag, 3. März 2025",
         "lundi 3 mars 2025"),
        (lambda at: at.date(SPRING, "long"), "March 3, 2025", "3. März 2025", "3 mars 2025"),
        (lambda at: at.month(SPRING), "March 2025", "März 2025", "mars 2025"),
        (lambda at: at.weekday(6), "Sunday", "Sonntag", "dimanche"),
        (lambda at: at.time(datetime.time(15, 5)), "3:05 PM", "15:05", "15:05"),
        (lambda at: at.period(datetime.timedelta(3)), "in 3 days", "in 3 Tagen", "dans 3 jours"),
        (lambda at: at.period(datetime.timedelta(-730)), "2 years ago", "vor 2 Jahren",
         "il y a 2 ans"),
        (lambda at: at.country("ES"), "Spain", "Spanien", "Espagne"),
        (lambda at: at.language("sv"), "Swedish", "Schwedisch", "suédois"),
        (lambda at: at.enumeration(["A", "B", "C"]), "A, B, and C", "A, B und C", "A, B et C"),
    ],
)  # fmt: skip
def test_wording_in_three_languages(say, english, german, french):
    assert (say(ENGLISH), say(GERMAN), say(FRENCH)) == (english, german, french)


@pytest.mark.parametrize("code", generated_phrases.LANGUAGES)
def test_phrases_are_complete_and_have_ordinary_spaces(code):
    language, rng = generated_phrases.Language(code), random.Random(0)
    for _ in range(3000):
        text = generated_phrases.draw_phrase(rng)(language)
        # Missing CLDR entries show up as identifiers: duration-hour.
        assert not re.search(r"\b(area|digital|duration|energy|length|mass|volume)-", text)
        assert not re.search(r"[^\S ]|  |^ | $", text)
        assert not re.search(r"[{}_]", text)


@pytest.mark.parametrize("target_language", ["de", "fr"])
def test_a_source_has_a_single_translation(target_language):
    translations: dict[str, str] = {}
    target, rng = generated_phrases.Language(target_language), random.Random(1)
    for _ in range(5000):
        meaning = generated_phrases.draw_phrase(rng)
        assert translations.setdefault(meaning(ENGLISH), meaning(target)) == meaning(target)
