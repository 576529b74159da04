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
from typing import TypeAlias

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
    """The wording of phrases in one language, which `option` has chosen.

    Raises:
      UserError: the language is not one of `LANGUAGES`.
    """

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
    return kind(rng)


def _number(rng: random.Random) -> int:
    """Draws a number up to 999,999, mostly a small one."""
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
    """Draws a ledger entry: a heading and a value."""
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
"""The kinds of phrases, with their weights in percent."""
