"""Translations that look wrong. The score of a corpus hides a few of them."""

import collections
import re

from flaxformer_mt.writing_systems import count_words, has_visible

_KINDS = {
    "empty": "are empty",
    "repetitive": "end in a run of one token",
    "copied": "repeat their source",
    "too_long": "are many times longer than their source",
}
_RUN = re.compile(r"(.{1,12}?)\1{3,}$")
_TAIL = 80  # Characters in which a run is looked for.


class Doubts:
    """Counts translations that look wrong, by reason.

    Attributes:
      counts: the number of translations for each of "empty", "repetitive", "copied" and "too_long"
        that there are.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._total = 0

    def add(self, translation: str, source: str | None, reference: str | None = None) -> None:
        """Counts a translation, with its source or at least its reference."""
        self._total += 1
        others = [text for text in (source, reference) if text is not None]
        if not others or not has_visible(others[0]):
            return
        if not has_visible(translation):
            self.counts["empty"] += 1
            return
        words = count_words(translation)
        found = {
            "repetitive": _ends_in_run(translation) and not any(map(_ends_in_run, others)),
            # Names and numbers stay as they are.
            "copied": source is not None
            and words > 1
            and translation.casefold() == source.strip().casefold()
            and translation != reference,
            "too_long": all(
                words > 3 * count_words(text) + 5 or len(translation) > 6 * len(text) + 30
                for text in others
            ),
        }
        self.counts.update(kind for kind, is_so in found.items() if is_so)

    def __str__(self) -> str:
        found = ", ".join(
            f"{self.counts[kind]:,} {words}" for kind, words in _KINDS.items() if self.counts[kind]
        )
        return f"of {self._total:,} translations, {found or 'none looks wrong'}"


def _ends_in_run(text: str) -> bool:
    found = _RUN.search(f" {' '.join(text.split())}"[-_TAIL:])
    return bool(found and not found[1].strip().isdecimal())
