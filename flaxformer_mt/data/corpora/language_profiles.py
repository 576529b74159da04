"""Which of two languages a text is in, told by its triples of letters.

A profile of a language can be made of any of its text. Babel has some for hundreds of languages:
the names of languages, countries, currencies, months, days and units in the Unicode CLDR.
"""

import collections
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

_LETTERS = 3
"""Letters in an n-gram: enough to tell Danish from Norwegian, few enough for some pages of text."""

_UNSEEN = 1e-4
"""Probability of a letter of which nothing is known."""

_FEWEST_LETTERS = 5000
"""Letters that a profile from the CLDR needs; languages that it hardly covers have fewer."""

_WORD = re.compile(r"[^\W\d_]+")


class Profile:
    """Probabilities of letters after the two before them.

    They are those of a hierarchical Dirichlet model (MacKay and Peto 1995): what follows few
    letters is the prior, with the weight of one letter, of what follows more.

    Args:
      texts: in the language; text that occurs twice counts once.
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
        """Of the last letter after the others."""
        if not letters:
            return _UNSEEN
        prior = self._probability(letters[1:])
        return (self._counts[letters] + prior) / (self._counts[letters[:-1]] + 1)

    def log_likelihood(self, letters: str) -> float:
        """Mean log-probability (natural) of a letter in `letters`, as `letters_of` gives them.

        It does not depend on the length, so it can be compared for texts in two languages.
        """
        ends = range(_LETTERS, len(letters) + 1)
        total = sum(self._log_probability(letters[end - _LETTERS : end]) for end in ends)
        return total / max(len(ends), 1)


def letters_of(texts: Iterable[str]) -> str:
    """The words of the texts in lower case, parted by spaces; texts that occur twice count once."""
    words = _WORD.findall(" ".join(dict.fromkeys(texts)).lower())
    return f" {' '.join(words)} "


@functools.cache
def cldr_profile(language: str) -> Profile | None:
    """The profile of a language by what the Unicode CLDR has of it.

    Args:
      language: ISO 639 code, also with script and territory: "de", "deu", "zh_Hant", "pt-BR".

    Returns:
      None if the CLDR does not know the language, or has little text in it.
    """
    import babel

    try:
        locale = babel.Locale.parse(language.replace("-", "_"))
    except (ValueError, babel.UnknownLocaleError):
        return None
    texts = list(_cldr_texts(locale))
    return Profile(texts) if len(letters_of(texts)) >= _FEWEST_LETTERS else None


def _cldr_texts(locale: Any) -> Iterator[str]:
    """Names in the language of a `babel.Locale`."""
    names = (locale.territories, locale.languages, locale.scripts, locale.currencies)
    for group in names:
        yield from group.values()
    for calendar in (locale.months, locale.days):
        for widths in calendar.values():
            yield from widths["wide"].values()
    for widths in locale.unit_display_names.values():
        yield from widths.values()
