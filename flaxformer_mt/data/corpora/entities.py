"""What programs leave behind in text: HTML entities ("&quot;", "&amp;amp;"), and "NULL"."""

import html
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping

from flaxformer_mt.data.corpora.rows import Dropped, location_of

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BREAKS = re.compile(r"[\t\n\r]+")
_DEEPEST = 4
ENTITIES, MISSING = "entities", "missing"
_ADVICE = {
    ENTITIES: "HTML entities, such as &quot;, the first at {}: data.unescape_html=True replaces "
    "them by their characters",
    MISSING: "a side that stands for a missing text, such as NULL, the first at {}: leave them out",
}
_PLACEHOLDERS = {
    *("null", "(null)", "<null>", "nul", "nil", "nan", "none", "na", "n/a", "#n/a", "undefined"),
    *("-", "--", "---", "\u2013", "\u2014", "?", "??", "\\n", "#value!", "#ref!", "#name?"),
}
"""Words that programs write where there is no text, with folded case."""
_LONGEST_PLACEHOLDER = 12  # With spaces around it.
_FEWEST_PLACEHOLDERS = 5  # Fewer may be text: "None" translates "Aucun".

_log = logging.getLogger(__name__)


def unescaped(text: str) -> str:
    """Replaces entities by their characters, also those that were escaped several times."""
    for _ in range(_DEEPEST):
        before = text
        # Line ends and tabs would divide a sentence.
        text = _ENTITY.sub(lambda found: _BREAKS.sub(" ", html.unescape(found[0])), before)
        if text == before:
            break
    return text


def notes_of(
    pairs: Iterable[tuple[str, str]], numbers: Iterable[int] | None = None
) -> dict[str, Dropped]:
    """Returns the pairs with entities under `ENTITIES`, and those without a text under `MISSING`.

    `numbers` are those of their rows in the corpus, by default from 1.
    """
    numbered = [*zip(numbers or itertools.count(1), pairs, strict=False)]

    def located(is_noted: Callable[[tuple[str, str]], bool]) -> list[str]:
        return [location_of(pair, number) for number, pair in numbered if is_noted(pair)]

    return {
        **Dropped.at(ENTITIES, located(lambda pair: any(map(_has_entity, pair)))),
        **Dropped.at(MISSING, located(_lacks_text)),
    }


def _has_entity(text: str) -> bool:
    return "&" in text and unescaped(text) != text


def _lacks_text(pair: tuple[str, str]) -> bool:
    if min(map(len, pair)) > _LONGEST_PLACEHOLDER:
        return False
    source, target = (text.strip().casefold() for text in pair)
    return source != target and (source in _PLACEHOLDERS or target in _PLACEHOLDERS)


def warn_of_notes(name: str, notes: Mapping[str, Dropped]) -> None:
    """Logs how many pairs of a corpus have notes, and where the first are, if there are any."""
    for reason, advice in _ADVICE.items():
        found = notes.get(reason)
        if found and found.count >= (_FEWEST_PLACEHOLDERS if reason == MISSING else 1):
            locations = "; ".join([found.example, *found.more])
            _log.warning("%s: %d pairs have %s", name, found.count, advice.format(locations))
