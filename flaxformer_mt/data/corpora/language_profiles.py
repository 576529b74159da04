"""Letter n-gram models that tell which of two languages a text is in.

A profile can be built from any text in a language. Babel contains text for hundreds of languages:
the names of languages, countries, currencies, months, days and units in the Unicode CLDR.
"""

import collections
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

_LETTERS = 3
"""Order of the n-grams: separates Danish from Norwegian, and needs only a few pages of text."""

_UNSEEN = 1e-4
"""Prior probability of a letter."""

_FEWEST_LETTERS = 5000
"""Minimum number of letters of a CLDR profile; languages with less text have none."""

_WORD = re.compile(r"[^\W\d_]+")


class Profile:
    """A letter trigram model of a language.

    It is a hierarchical Dirichlet model (MacKay and Peto 1995): the distribution after a shorter
    context is the prior, with the weight of one letter, of that after a longer one.

    Args:
      texts: texts in the language; duplicates are ignored.
    """

    def __init__(self, texts: Iterable[str]):
        letters = letters_of(texts)
        self._counts = collections.Counter(
            letters[end - length : end]
            for length in range(_LETTERS + 1)
            for end in range(length, len(letters) + 1)
        )
        self._log_probability = functools.cache(
            lambda letters: math.log(self._probability(letters))
        )

    def _probability(self, letters: str) -> float:
        """Returns the probability of the last letter given the others."""
        if not letters:
            return _UNSEEN
        prior = self._probability(letters[1:])
        return (self._counts[letters] + prior) / (self._counts[letters[:-1]] + 1)

    def log_likelihood(self, letters: str) -> float:
        """Returns the mean natural log-probability per letter of a text from `letters_of`.

        The mean makes texts of different lengths comparable.
        """
        ends = range(_LETTERS, len(letters) + 1)
        total = sum(self._log_probability(letters[end - _LETTERS : end]) for end in ends)
        return total / max(len(ends), 1)


def letters_of(texts: Iterable[str]) -> str:
    """Returns the lower-case words of the texts, space-separated, without duplicate texts."""
    words = _WORD.findall(" ".join(dict.fromkeys(texts)).lower())
    return f" {' '.join(words)} "


@functools.cache
def cldr_profile(language: str) -> Profile | None:
    """Returns the profile of a language built from the Unicode CLDR.

    Args:
      language: ISO 639 code, optionally with script and territory: "de", "deu", "zh_Hant", "pt-BR".

    Returns:
      The profile, or None if the CLDR has no or too little text in the language, or Babel (the
      extra `demo`) is not installed.
    """
    try:
        import babel
    except ImportError:
        return None
    try:
        locale = babel.Locale.parse(language.replace("-", "_"))
    except (ValueError, babel.UnknownLocaleError):
        return None
    texts = list(_cldr_texts(locale))
    return Profile(texts) if len(letters_of(texts)) >= _FEWEST_LETTERS else None


def _cldr_texts(locale: Any) -> Iterator[str]:
    """Yields the localized names in a `babel.Locale`."""
    names = (locale.territories, locale.languages, locale.scripts, locale.currencies)
    for group in names:
        yield from group.values()
    for calendar in (locale.months, locale.days):
        for widths in calendar.values():
            yield from widths["wide"].values()
    for widths in locale.unit_display_names.values():
        yield from widths.values()
