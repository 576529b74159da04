"""The phrases corpus: numbers, dates, times, units, money and lists, said in two languages.

A phrase is drawn as a meaning: a function that says it in a given language. num2words spells the
numbers; the Unicode CLDR, read through Babel, knows names, plurals, word order and separators. One
meaning is worded in one way, so the translation follows from the source and can be learned.
"""

import datetime
import functools
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TypeAlias

import babel
import babel.dates
import babel.lists
import babel.numbers
import babel.units
from num2words import num2words

from flaxformer_mt.errors import UserError

LANGUAGES = ("de", "en", "fr")
"""Languages in which both libraries have a correct wording for everything below."""

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
# Days in a unit of time, and the most of them before the next larger unit says it shorter.
_PERIODS = ((1, 6), (7, 3), (30, 10), (365, 99))


class Language:
    """Says things in one language.

    Args:
      code: one of `LANGUAGES`.
      option: what an error names if it is not.

    Raises:
      UserError: the language is not supported.
    """

    def __init__(self, code: str, option: str = "language"):
        if code not in LANGUAGES:
            raise UserError(
                f"{option}={code}: data.corpus=phrases knows {', '.join(LANGUAGES)} only"
            )
        self._code = code
        self._locale = babel.Locale.parse(code)

    def cardinal(self, number: int) -> str:
        """The number in words: twelve, douze, zwölf."""
        return _spelled(number, self._code)

    def ordinal(self, number: int) -> str:
        """The number in words: twelfth, douzième, zwölfte."""
        return num2words(number, lang=self._code, to="ordinal")

    def percentage(self, value: Decimal) -> str:
        """The number in digits: 12.5%, 12,5 %."""
        return _plain(
            babel.numbers.format_percent(
                value / 100, locale=self._locale, decimal_quantization=False
            )
        )

    def quantity(self, count: int, unit: str) -> str:
        """A count in words and a unit of the CLDR: twelve kilometers, douze kilomètres."""
        in_digits = babel.units.format_unit(count, unit, "long", locale=self._locale)
        digits = babel.numbers.format_decimal(count, locale=self._locale)
        return _plain(in_digits.replace(digits, self.cardinal(count)))

    def money(self, count: int, currency: str) -> str:
        """A count in words and a currency by its ISO 4217 code: twelve euros, zwölf Euro."""
        name = babel.numbers.get_currency_name(currency, count=count, locale=self._locale)
        return _plain(f"{self.cardinal(count)} {name}")

    def date(self, date: datetime.date, style: str) -> str:
        """A date, with its weekday if `style` is full, without if it is long."""
        return _plain(babel.dates.format_date(date, style, locale=self._locale))

    def month(self, date: datetime.date) -> str:
        """Month and year: March 2025, mars 2025."""
        return _plain(babel.dates.format_skeleton("yMMMM", date, locale=self._locale))

    def weekday(self, number: int) -> str:
        """The name of a weekday, 0 = Monday."""
        return self._locale.days["stand-alone"]["wide"][number]

    def time(self, time: datetime.time) -> str:
        """A time of the day: 3:05 PM, 15:05."""
        return _plain(babel.dates.format_time(time, "short", locale=self._locale))

    def period(self, period: datetime.timedelta) -> str:
        """The distance from now, in the largest unit that fits: in 3 days, il y a 2 ans."""
        return _plain(babel.dates.format_timedelta(period, add_direction=True, locale=self._locale))

    def country(self, code: str) -> str:
        """The name of a country by its ISO 3166 code."""
        return _plain(self._locale.territories[code])

    def language(self, code: str) -> str:
        """The name of a language by its ISO 639 code."""
        return _plain(self._locale.languages[code])

    def enumeration(self, items: Sequence[str]) -> str:
        """The items with separators: A, B, and C; A, B et C."""
        return babel.lists.format_list(items, locale=self._locale)


@functools.cache
def _spelled(number: int, code: str) -> str:
    """The number in words; kept, because it takes longer than all else and small ones are many."""
    return num2words(number, lang=code)


def _plain(text: str) -> str:
    """The text with plain spaces for the narrow and no-break ones that typography asks for."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")


Meaning: TypeAlias = Callable[[Language], str]


def draw_phrase(rng: random.Random) -> Meaning:
    """Draws a phrase of any kind."""
    (kind,) = rng.choices(list(_KINDS), weights=list(_KINDS.values()))
    return kind(rng)


def _number(rng: random.Random) -> int:
    """Mostly small, at most 999,999."""
    (limit,) = rng.choices((100, 1_000, 10_000, 1_000_000), weights=(35, 40, 15, 10))
    return rng.randrange(limit)


def _count(rng: random.Random) -> int:
    """A number below 1000 that can stand before a noun.

    None ends in one: its form follows the gender of the noun (vingt et une heures), which neither
    library knows.
    """
    number = rng.randrange(rng.choice((100, 1_000)))
    return number + 1 if number % 10 == 1 else number


def _date(rng: random.Random) -> datetime.date:
    return datetime.date(1950, 1, 1) + datetime.timedelta(days=rng.randrange(36525))


def _cardinal(rng: random.Random) -> Meaning:
    number = _number(rng)
    return lambda language: language.cardinal(number)


def _ordinal(rng: random.Random) -> Meaning:
    number = rng.randrange(1, rng.choice((100, 1_000)))
    return lambda language: language.ordinal(number)


def _percentage(rng: random.Random) -> Meaning:
    value = Decimal(rng.randrange(1, 1_000)) / 10
    return lambda language: language.percentage(value)


def _quantity(rng: random.Random) -> Meaning:
    count, unit = _count(rng), rng.choice(_UNITS)
    return lambda language: language.quantity(count, unit)


def _money(rng: random.Random) -> Meaning:
    count, currency = _count(rng), rng.choice(_CURRENCIES)
    return lambda language: language.money(count, currency)


def _day(rng: random.Random) -> Meaning:
    date, style = _date(rng), rng.choice(("full", "long"))
    return lambda language: language.date(date, style)


def _month(rng: random.Random) -> Meaning:
    date = _date(rng)
    return lambda language: language.month(date)


def _weekday(rng: random.Random) -> Meaning:
    number = rng.randrange(7)
    return lambda language: language.weekday(number)


def _time(rng: random.Random) -> Meaning:
    time = datetime.time(rng.randrange(24), rng.randrange(60))
    return lambda language: language.time(time)


def _appointment(rng: random.Random) -> Meaning:
    day, time = _day(rng), _time(rng)
    return lambda language: f"{day(language)}, {time(language)}"


def _period(rng: random.Random) -> Meaning:
    days, most = rng.choice(_PERIODS)
    period = datetime.timedelta(days=days * rng.randint(2, most) * rng.choice((1, -1)))
    return lambda language: language.period(period)


def _country(rng: random.Random) -> Meaning:
    code = rng.choice(_COUNTRIES)
    return lambda language: language.country(code)


def _countries(rng: random.Random) -> Meaning:
    codes = rng.sample(_COUNTRIES, rng.randint(2, 4))
    return lambda language: language.enumeration([language.country(code) for code in codes])


def _languages(rng: random.Random) -> Meaning:
    codes = rng.sample(_LANGUAGE_NAMES, rng.randint(2, 4))
    return lambda language: language.enumeration([language.language(code) for code in codes])


def _weekdays(rng: random.Random) -> Meaning:
    numbers = rng.sample(range(7), rng.randint(2, 3))
    return lambda language: language.enumeration([language.weekday(n) for n in numbers])


def _quantities(rng: random.Random) -> Meaning:
    items = [(_count(rng), unit) for unit in rng.sample(_UNITS, rng.randint(2, 3))]
    return lambda language: language.enumeration([language.quantity(*item) for item in items])


def _enumeration(rng: random.Random) -> Meaning:
    return rng.choice((_countries, _languages, _weekdays, _quantities))(rng)


def _entry(rng: random.Random) -> Meaning:
    """A line of a ledger: a heading and what is recorded under it."""
    heading = rng.choice((_country, _day, _month, _weekday))(rng)
    record = rng.choice((_quantity, _money, _percentage, _time))(rng)
    return lambda language: f"{heading(language)} – {record(language)}"


_KINDS = {
    _cardinal: 20,
    _ordinal: 8,
    _percentage: 2,
    _quantity: 12,
    _money: 12,
    _day: 8,
    _month: 2,
    _time: 4,
    _appointment: 8,
    _period: 2,
    _enumeration: 14,
    _entry: 8,
}
"""The kinds of phrases, and out of a hundred phrases how many are of a kind."""
