"""The "phrases" corpus: generated numbers, dates, times, units, money and lists in two languages.

A phrase is drawn as a meaning: a function from a language to its wording. num2words spells numbers;
the Unicode CLDR, through Babel, has names, plurals, word order and separators. Each meaning has a
single wording per language, so the translation is a function of the source and can be learned.
"""

import datetime
import functools
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import babel
import babel.dates
import babel.lists
import babel.numbers
import babel.units
from num2words import num2words

from flaxformer_mt.errors import UserError

LANGUAGES = ("de", "en", "fr")
"""Languages for which both libraries word every phrase correctly."""

_UNITS = (
    "length-kilometer", "length-meter", "length-centimeter", "length-millimeter", "length-mile",
    "area-square-kilometer", "area-hectare", "volume-liter", "volume-cubic-meter",
    "mass-kilogram", "mass-gram", "speed-kilometer-per-hour", "temperature-celsius",
    "energy-kilowatt-hour", "power-watt", "electric-volt", "digital-megabyte", "digital-gigabyte",
    "duration-second", "duration-minute", "duration-hour", "duration-day", "duration-week",
    "duration-month", "duration-year",
)  # fmt: skip
_CURRENCIES = (
    "EUR", "USD", "GBP", "JPY", "CHF", "CAD", "AUD", "CNY", "INR", "BRL", "MXN", "SEK", "NOK",
    "DKK", "PLN", "CZK", "HUF", "TRY", "ZAR", "KRW",
)  # fmt: skip
_COUNTRIES = (
    "FR", "DE", "IT", "ES", "PT", "NL", "BE", "CH", "AT", "GB", "IE", "DK", "SE", "NO", "FI",
    "PL", "CZ", "HU", "GR", "TR", "UA", "RO", "US", "CA", "MX", "BR", "AR", "CL", "PE", "CO",
    "JP", "CN", "IN", "KR", "VN", "TH", "AU", "NZ", "EG", "MA", "KE", "NG", "ZA", "SN",
)  # fmt: skip
_LANGUAGE_NAMES = (
    "en", "de", "fr", "es", "it", "pt", "nl", "da", "sv", "fi", "pl", "cs", "hu", "el", "tr",
    "uk", "ru", "ja", "zh", "ko", "hi", "ar", "he", "sw",
)  # fmt: skip
# Days per unit of time, and the largest count before Babel switches to the next larger unit.
_PERIODS = ((1, 6), (7, 3), (30, 10), (365, 99))


class Language:
    """The wording of phrases in one of `LANGUAGES`, which `option` has chosen."""

    def __init__(self, code: str, option: str = "language"):
        if code not in LANGUAGES:
            raise UserError(
                f"{option}={code}: data.corpus=phrases only supports {', '.join(LANGUAGES)}"
            )
        self._code = code
        self._locale = babel.Locale.parse(code)

    def cardinal(self, number: int) -> str:
        """Returns a cardinal number in words: twelve, douze, zwölf."""
        return _spelled(number, self._code)

    def ordinal(self, number: int) -> str:
        """Returns an ordinal number in words: twelfth, douzième, zwölfte."""
        return num2words(number, lang=self._code, to="ordinal")

    def percentage(self, value: Decimal) -> str:
        """Returns a percentage in digits: 12.5%, 12,5 %."""
        return _plain(
            babel.numbers.format_percent(
                value / 100, locale=self._locale, decimal_quantization=False
            )
        )

    def quantity(self, count: int, unit: str) -> str:
        """Returns a count in words and a CLDR unit: twelve kilometers, douze kilomètres."""
        in_digits = babel.units.format_unit(count, unit, "long", locale=self._locale)
        digits = babel.numbers.format_decimal(count, locale=self._locale)
        return _plain(in_digits.replace(digits, self.cardinal(count)))

    def money(self, count: int, currency: str) -> str:
        """Returns a count in words and an ISO 4217 currency: twelve euros, zwölf Euro."""
        name = babel.numbers.get_currency_name(currency, count=count, locale=self._locale)
        return _plain(f"{self.cardinal(count)} {name}")

    def date(self, date: datetime.date, style: str) -> str:
        """Returns a date in the style "full", with the weekday, or "long", without."""
        return _plain(babel.dates.format_date(date, style, locale=self._locale))

    def month(self, date: datetime.date) -> str:
        """Returns month and year: March 2025, mars 2025."""
        return _plain(babel.dates.format_skeleton("yMMMM", date, locale=self._locale))

    def weekday(self, number: int) -> str:
        """Returns the name of a weekday, 0 = Monday."""
        return self._locale.days["stand-alone"]["wide"][number]

    def time(self, time: datetime.time) -> str:
        """Returns a time of day: 3:05 PM, 15:05."""
        return _plain(babel.dates.format_time(time, "short", locale=self._locale))

    def period(self, period: datetime.timedelta) -> str:
        """Returns a relative time in the largest suitable unit: in 3 days, il y a 2 ans."""
        return _plain(babel.dates.format_timedelta(period, add_direction=True, locale=self._locale))

    def country(self, code: str) -> str:
        """Returns the name of a country with this ISO 3166 code."""
        return _plain(self._locale.territories[code])

    def language(self, code: str) -> str:
        """Returns the name of a language with this ISO 639 code."""
        return _plain(self._locale.languages[code])

    def enumeration(self, items: Sequence[str]) -> str:
        """Returns a list of items: A, B, and C; A, B et C."""
        return babel.lists.format_list(items, locale=self._locale)


@functools.cache
def _spelled(number: int, code: str) -> str:
    """Returns a number in words. Cached: it is the slowest step, and most numbers recur."""
    return num2words(number, lang=code)


def _plain(text: str) -> str:
    """Replaces narrow and no-break spaces by ordinary ones."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")


Meaning: TypeAlias = Callable[[Language], str]


def draw_phrase(rng: random.Random) -> Meaning:
    """Draws a phrase of a random kind."""
    (kind,) = rng.choices(list(_KINDS), weights=list(_KINDS.values()))
    return _DRAWN[kind](rng)


def _one_of(rng: random.Random, *kinds: str) -> Meaning:
    return _DRAWN[rng.choice(kinds)](rng)


def _number(rng: random.Random) -> int:
    (limit,) = rng.choices((100, 1_000, 10_000, 1_000_000), weights=(35, 40, 15, 10))
    return rng.randrange(limit)


def _count(rng: random.Random) -> int:
    """Draws a number below 1000 that can precede a noun.

    None ends in the digit one, whose form depends on the gender of the noun (vingt et une heures),
    which neither library has.
    """
    number = rng.randrange(rng.choice((100, 1_000)))
    return number + 1 if number % 10 == 1 else number


def _date(rng: random.Random) -> datetime.date:
    return datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(36525))


def _period(rng: random.Random) -> datetime.timedelta:
    days, most = rng.choice(_PERIODS)
    return datetime.timedelta(days=days * rng.randint(2, most) * rng.choice((1, -1)))


def _said(word: Callable[..., str], *values: Any) -> Meaning:
    return lambda language: word(language, *values)


def _listed(word: Callable[..., str], items: Sequence[tuple[Any, ...]]) -> Meaning:
    return lambda language: language.enumeration([word(language, *item) for item in items])


def _joined(separator: str, first: Meaning, second: Meaning) -> Meaning:
    return lambda language: f"{first(language)}{separator}{second(language)}"


def _some(rng: random.Random, values: Sequence[Any], most: int) -> list[tuple[Any]]:
    """Draws two or more values, each as the arguments of a wording."""
    return [(value,) for value in rng.sample(values, rng.randint(2, most))]


_DRAWN: dict[str, Callable[[random.Random], Meaning]] = {
    "cardinal": lambda rng: _said(Language.cardinal, _number(rng)),
    "ordinal": lambda rng: _said(Language.ordinal, rng.randrange(1, rng.choice((100, 1_000)))),
    "percentage": lambda rng: _said(Language.percentage, Decimal(rng.randrange(1, 1_000)) / 10),
    "quantity": lambda rng: _said(Language.quantity, _count(rng), rng.choice(_UNITS)),
    "money": lambda rng: _said(Language.money, _count(rng), rng.choice(_CURRENCIES)),
    "day": lambda rng: _said(Language.date, _date(rng), rng.choice(("full", "long"))),
    "month": lambda rng: _said(Language.month, _date(rng)),
    "weekday": lambda rng: _said(Language.weekday, rng.randrange(7)),
    "time": lambda rng: _said(Language.time, datetime.time(rng.randrange(24), rng.randrange(60))),
    "appointment": lambda rng: _joined(", ", _DRAWN["day"](rng), _DRAWN["time"](rng)),
    "period": lambda rng: _said(Language.period, _period(rng)),
    "country": lambda rng: _said(Language.country, rng.choice(_COUNTRIES)),
    "countries": lambda rng: _listed(Language.country, _some(rng, _COUNTRIES, 4)),
    "languages": lambda rng: _listed(Language.language, _some(rng, _LANGUAGE_NAMES, 4)),
    "weekdays": lambda rng: _listed(Language.weekday, _some(rng, range(7), 3)),
    "quantities": lambda rng: _listed(
        Language.quantity, [(_count(rng), unit) for (unit,) in _some(rng, _UNITS, 3)]
    ),
    "enumeration": lambda rng: _one_of(rng, "countries", "languages", "weekdays", "quantities"),
    # A ledger entry: a heading and a value.
    "entry": lambda rng: _joined(
        " – ",
        _one_of(rng, "country", "day", "month", "weekday"),
        _one_of(rng, "quantity", "money", "percentage", "time"),
    ),
}
"""Draws the meaning of a phrase of each kind."""
_KINDS = {
    "cardinal": 20,
    "ordinal": 8,
    "percentage": 2,
    "quantity": 12,
    "money": 12,
    "day": 8,
    "month": 2,
    "time": 4,
    "appointment": 8,
    "period": 2,
    "enumeration": 14,
    "entry": 8,
}
"""The kinds of phrases, with their weights in percent."""
