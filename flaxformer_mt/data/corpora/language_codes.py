"""Codes and names of languages, and which text of a file is in a language that is wanted.

Codes are those of BCP 47 ("pt-BR"), of ISO 639 ("por"), of locales ("pt_BR.UTF-8") and of FLORES
("por_Latn"), in any case. Of several codes that fit the one that is wanted, the best is the one
with the same script and region, then one without a region or with the usual one, then one whose
script is not said.

Source: RFC 5646 and RFC 4647 ("BCP 47"), and the likely subtags of the Unicode CLDR.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import langcodes
from langcodes.tag_parser import LanguageTagError

_COMMON_NAMES = {
    "chn": "zh", "chs": "zh-Hans", "cht": "zh-Hant", "cn": "zh", "cz": "cs", "dk": "da",
    "gr": "el", "jp": "ja", "nb": "no", "ua": "uk", "zh-chs": "zh-Hans", "zh-cht": "zh-Hant",
}  # fmt: skip
"""Codes that are common, but not those of BCP 47; and one language that has two."""
_MODIFIERS = {"latin": "Latn", "cyrillic": "Cyrl"}
"""The scripts that locales name: "sr_RS@latin"."""
_CODE = re.compile(r"([a-z]{2,3}(?:[-_][a-z0-9]{1,8})*)(?:\.[\w-]+)?(?:@(\w+))?", re.IGNORECASE)

_FILE = Path(__file__).with_name("language_names.txt")
_LINES = [line.split() for line in _FILE.read_text("utf-8").splitlines()]
_NAMES = {name: line[0] for line in _LINES for name in line if line[0].islower()}
"""Codes of languages by their names and further codes."""
_VARIETIES = {name: line[0] for line in _LINES for name in line[1:] if not line[0].islower()}
"""Regions and scripts by their names."""
_ROLES = (
    {"source", "src", "original", "input", "text", "sentence"},
    {"target", "tgt", "trg", "translation", "output", "reference"},
)
"""Words that name the columns of sources and targets."""
_FURTHER = {"text", "sentence", "sentences", "segment", "language", "lang", "column", "united"}
"""Words that may be beside one of a role or a language: "English sentence"."""
_NESTED = "translation."
"""The beginning of the names of columns that are members of a column `translation`."""


class Code(NamedTuple):
    """A language, and what its code says about the script, the region and the variant."""

    language: str
    """The shortest code ("de")."""
    script: str = ""
    region: str = ""
    variant: str = ""

    @property
    def likely(self) -> "Code":
        """The code with the script and the region that it most probably has."""
        found = langcodes.Language.make(
            self.language, script=self.script or None, territory=self.region or None
        ).maximize()
        return self._replace(script=found.script or "", region=found.territory or "")

    @property
    def is_known(self) -> bool:
        """Whether there is such a language."""
        return langcodes.tag_is_valid(self.language)


@functools.lru_cache(4096)
def parsed(code: str) -> Code:
    """Returns what a code says. Text that is no code becomes a language of this name."""
    found = _CODE.fullmatch(code.strip())
    if found is None:
        return Code(code.strip().casefold())
    tag = found[1].lower().replace("_", "-")
    for name in (tag, tag.partition("-")[0]):
        if name in _COMMON_NAMES:
            tag = _COMMON_NAMES[name] + tag.removeprefix(name)
            break
    try:
        tag = langcodes.standardize_tag(tag, macro=True)
        values = langcodes.Language.get(tag)
    except LanguageTagError:
        return Code(tag)
    language = _COMMON_NAMES.get(values.language or "", values.language or "")
    variants = [*(values.extlangs or ()), *(values.variants or ()), *(values.extensions or ())]
    script = values.script or _MODIFIERS.get((found[2] or "").lower(), "")
    return Code(language, script, values.territory or "", "-".join(variants))


@functools.lru_cache(4096)
def distance(wanted: Code, found: Code) -> tuple[int, int, int] | None:
    """Returns how far a code is from the wanted one, or None if it does not fit.

    The numbers are distances of the script, the region and the variant; equal ones are 0. Scripts
    that differ fit only if a code says neither script nor region: their distance is 1 if this is
    the found code, and 2 if it is the wanted one.
    """
    if wanted.language != found.language:
        return None
    ours, theirs = wanted.likely, found.likely
    script = 0
    if ours.script != theirs.script:
        is_open = [not (code.script or code.region) for code in (wanted, found)]
        if not any(is_open):
            return None
        script = 2 if is_open[0] else 1
    region, variant = (
        0 if one == other else 1 if not other or (not one and other == usual) else 2
        for one, other, usual in (
            (wanted.region, found.region, ours.region),
            (wanted.variant, found.variant, ""),
        )
    )
    if (region == 2 and wanted.region) or (variant == 2 and wanted.variant):
        return None
    return script, region, variant


def chosen(codes: Sequence[str], languages: Sequence[str]) -> tuple[int, ...] | None:
    """Returns the index of the best code for each language, the first one of equal ones.

    The indices are different. None if a language has no code.
    """
    return _best([_ranked(language, [*map(parsed, codes)]) for language in languages])


def sides_of(cells: Sequence[str], languages: tuple[str, str]) -> tuple[int, ...] | None:
    """Returns the indices of the two cells that name the source and the target.

    The languages have names ("French", "français", "fra", "fr", "fr_FR", "fr_text", "French
    (Canada)"), and may be members of `translation`; otherwise the sides are called "source" and
    "target", or likewise. None if a side has no cell, or several that fit equally well.
    """
    if nested := [index for index, cell in enumerate(cells) if cell.startswith(_NESTED)]:
        inner = sides_of([cells[index].removeprefix(_NESTED) for index in nested], languages)
        if inner:
            return tuple(nested[index] for index in inner)
    for codes in (
        [[_header_code(cell, side) for cell in cells] for side in (0, 1)],
        [[_role_code(cell, side, code) for cell in cells] for side, code in enumerate(languages)],
    ):
        found = [*map(_ranked, languages, codes)]
        if all(len(each) < 2 or each[0][0] < each[1][0] for each in found) and (
            sides := _best(found)
        ):
            return sides
    return None


_Ranked: TypeAlias = list[tuple[tuple[int, int, int], int]]
"""Distances and indices of the codes that fit, the best first."""


def _ranked(wanted: str, codes: Iterable[Code | None]) -> _Ranked:
    found = [(code and distance(parsed(wanted), code), index) for index, code in enumerate(codes)]
    return sorted((how_far, index) for how_far, index in found if how_far is not None)


def _best(ranked: Sequence[_Ranked]) -> tuple[int, ...] | None:
    choices = [[*zip(*each, strict=True)] for each in itertools.product(*ranked)]
    best = min((each for each in choices if len({*each[1]}) == len(ranked)), default=None)
    return None if best is None else best[1]


def _header_code(cell: str, side: int) -> Code | None:
    """Returns the language that a header names, if it names one."""
    words = [word for word in _words(cell) if word not in _FURTHER | _ROLES[side]]
    if _CODE.fullmatch("-".join(words)):
        code = parsed("-".join(words))
        return None if code.variant else code
    for name in filter(_NAMES.__contains__, words):
        rest = [word for word in words if _NAMES.get(word) != _NAMES[name]]
        if all(word in _VARIETIES for word in rest):
            return parsed("-".join([_NAMES[name], *(_VARIETIES[word] for word in rest)]))
    return None


def _role_code(cell: str, side: int, language: str) -> Code | None:
    """Returns the code of a side if a header names the side."""
    words = {*_words(cell)}
    names_side = words & _ROLES[side] and words <= _ROLES[side] | _FURTHER
    return parsed(language) if names_side else None


def _words(cell: str) -> list[str]:
    return re.findall(r"[^\W_]+", cell.casefold())
