"""HTML entities in text, such as "&quot;" and "&amp;amp;", which programs leave behind."""

import html
import itertools
import logging
import re
from collections.abc import Iterable, Mapping

from flaxformer_mt.data.corpora.rows import Dropped, location_of

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BREAKS = re.compile(r"[\t\n\r]+")
_DEEPEST = 4
ENTITIES = "entities"

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


def pairs_with_entities(
    pairs: Iterable[tuple[str, str]], numbers: Iterable[int] | None = None
) -> dict[str, Dropped]:
    """Returns the pairs with entities, if any, under `ENTITIES`.

    `numbers` are those of their rows in the corpus, by default from 1.
    """
    numbered = zip(numbers or itertools.count(1), pairs, strict=False)
    locations = [
        location_of(pair, number) for number, pair in numbered if any(map(_has_entity, pair))
    ]
    return Dropped.at(ENTITIES, locations)


def _has_entity(text: str) -> bool:
    return "&" in text and unescaped(text) != text


def warn_of_entities(name: str, notes: Mapping[str, Dropped]) -> None:
    """Logs how many pairs of a corpus have entities, and where the first are, if there are any."""
    if found := notes.get(ENTITIES):
        _log.warning(
            "%s: %d pairs have HTML entities, such as &quot;, the first at %s: "
            "data.unescape_html=True replaces them by their characters",
            *(name, found.count, "; ".join([found.example, *found.more])),
        )
