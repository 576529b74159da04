"""Recognizes the first row of a table as a header, by the names of its two columns."""

import re
from collections.abc import Sequence

_NAMES = """
af afr afrikaans
ar ara arabic العربية
bg bul bulgarian български
bn ben bengali বাংলা
bs bos bosnian bosanski
ca cat catalan català
cs ces cze czech čeština
da dan danish dansk
de deu ger german deutsch
el ell gre greek ελληνικά
en eng english
eo epo esperanto
es spa spanish español castellano
et est estonian eesti
eu eus baq basque euskara
fa fas per pes persian farsi فارسی
fi fin finnish suomi
fr fra fre french français
ga gle irish gaeilge
gl glg galician galego
he heb hebrew עברית
hi hin hindi हिन्दी
hr hrv croatian hrvatski
hu hun hungarian magyar
id ind indonesian indonesia
is isl ice icelandic íslenska
it ita italian italiano
ja jpn japanese 日本語
ko kor korean 한국어
la lat latin latina
lt lit lithuanian lietuvių
lv lav latvian latviešu
mk mkd mac macedonian македонски
ms msa may zsm malay melayu
mt mlt maltese malti
nb nob no nor norwegian bokmål norsk
nl nld dut dutch nederlands
pl pol polish polski
pt por portuguese português
ro ron rum romanian română
ru rus russian русский
sk slk slo slovak slovenčina
sl slv slovene slovenian slovenščina
sq sqi alb albanian shqip
sr srp serbian српски srpski
sv swe swedish svenska
sw swa swh swahili kiswahili
ta tam tamil தமிழ்
th tha thai ไทย
tr tur turkish türkçe
uk ukr ukrainian українська
ur urd urdu اردو
vi vie vietnamese tiếng việt
zh zho chi cmn chinese mandarin 中文
"""
_LANGUAGES = [line.split() for line in _NAMES.strip().splitlines()]

_ROLES = (
    {"source", "src", "original", "input", "text", "sentence"},
    {"target", "tgt", "trg", "translation", "output", "reference"},
)
"""Words that name the columns of sources and targets."""

_FURTHER = {"text", "sentence", "sentences", "segment", "language", "lang", "column"}
"""Words that may be beside one of a role or a language: "English sentence"."""


def sides_of(cells: Sequence[str], languages: tuple[str, str]) -> tuple[int, int] | None:
    """Returns the indices of the only two cells that name the source and the target.

    The languages have names ("French", "français", "fra", "fr", "fr_FR", "fr_text"); otherwise the
    sides are called "source" and "target", or likewise. None if a side has no cell, or several.
    """
    for choose in (_language_words, _role_words):
        found = [
            [index for index, cell in enumerate(cells) if _consists_of(cell, *choose(side, code))]
            for side, code in enumerate(languages)
        ]
        if [len(indices) for indices in found] == [1, 1] and found[0] != found[1]:
            return found[0][0], found[1][0]
    return None


def _consists_of(cell: str, names: set[str], further: set[str]) -> bool:
    """Returns whether a cell has one of `names`, and besides them only further words."""
    words = set(re.findall(r"[^\W_]+", cell.casefold()))
    return bool(words & names) and words <= names | further


def _language_words(side: int, code: str) -> tuple[set[str], set[str]]:
    parts = re.split("[-_]", code.casefold())
    names = {word for line in _LANGUAGES if parts[0] in line for word in line} | {parts[0]}
    return names, {*parts, *_FURTHER, *_ROLES[side]}


def _role_words(side: int, code: str) -> tuple[set[str], set[str]]:
    return _ROLES[side], _FURTHER
