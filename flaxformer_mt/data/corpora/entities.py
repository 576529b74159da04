"""HTML entities in text, such as "&quot;" and "&amp;amp;", which programs leave behind."""

import dataclasses
import html
import itertools
import logging
import re
from collections.abc import Iterable

from flaxformer_mt.data.corpora.rows import place_of

_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BREAKS = re.compile(r"[\t\n\r]+")
_DEEPEST = 4
_LISTED = 5

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


@dataclasses.dataclass
class EntityCounter:
    """Counts the pairs with entities, for one warning per corpus."""

    count: int = 0
    places: list[str] = dataclasses.field(default_factory=list)
    """The places of the first ones."""

    def add(self, pairs: Iterable[tuple[str, str]], numbers: Iterable[int] | None = None) -> None:
        """Counts pairs; `numbers` are those of their rows in the corpus, by default from 1."""
        for number, pair in zip(numbers or itertools.count(1), pairs, strict=False):
            if "&" in pair[0] + pair[1] and unescaped(pair[0]) + unescaped(pair[1]) != "".join(
                pair
            ):
                self.count += 1
                if len(self.places) < _LISTED:
                    self.places.append(place_of(pair, number))

    def merge(self, later: "EntityCounter") -> None:
        """Adds the pairs that another one has counted, which come later in the corpus."""
        self.count += later.count
        self.places = [*self.places, *later.places][:_LISTED]

    def warn(self, name: str) -> None:
        """Logs the number of pairs with entities, and the places of the first, if there are any."""
        if self.count:
            _log.warning(
                "%s: %d pairs have HTML entities, such as &quot;, the first at %s: "
                "data.unescape_html=True replaces them by their characters",
                *(name, self.count, "; ".join(self.places)),
            )
