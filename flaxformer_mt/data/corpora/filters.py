"""Which training pairs are left out, and why: each reason with its count and an example.

    choose = PairFilter(config.data, corpus)
    kept = [pair for number, pair in enumerate(corpus.pairs(), 1) if choose.keep(number, *pair)]
    report = {reason: dataclasses.asdict(dropped) for reason, dropped in choose.dropped.items()}

Only training corpora are filtered: what a development or test set measures must not depend on the
options of a run.
"""

import collections
import dataclasses
import functools
import hashlib
import unicodedata
from collections.abc import Callable

import numpy as np

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.errors import UserError

_EXAMPLE_LENGTH = 60  # Characters of a side that an example shows.
_MERGE_AT = 1 << 20  # Hashes in a Python set before they join the sorted array.

# First words of the Unicode names of a script's characters, where they are not the script's own
# English name.
_NAMES_OF_SCRIPTS = {
    "Hans": ("CJK",),
    "Hant": ("CJK",),
    "Jpan": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    "Kore": ("HANGUL", "CJK"),
    "Beng": ("BENGALI",),
    "Cans": ("CANADIAN",),
    "Lisu": ("LISU",),
    "Mtei": ("MEETEI",),
    "Nkoo": ("NKO",),
    "Orya": ("ORIYA",),
}


@dataclasses.dataclass(frozen=True)
class Dropped:
    """The pairs that were left out for one reason."""

    count: int
    """How many."""
    example: str
    """The first of them: its number, from 1, and its sides, shortened."""


class SeenPairs:
    """Remembers which pairs were seen, in 8 bytes each: a 64-bit hash.

    Among 10 million different pairs, two have the same hash with a probability of 3 in a million.

    Args:
      hashes: uint64 [N], those seen earlier; see `hashes`.
    """

    def __init__(self, hashes: np.ndarray | None = None):
        self._sorted = np.sort(hashes) if hashes is not None else np.empty(0, np.uint64)
        self._recent: set[int] = set()

    @property
    def hashes(self) -> np.ndarray:
        """uint64 [N], sorted: all pairs seen, as the constructor takes them."""
        self._merge()
        return self._sorted

    def add(self, source: str, target: str) -> bool:
        """Remembers a pair; whether it was new."""
        digest = hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        if number in self._recent or self._was_merged(np.uint64(number)):
            return False
        self._recent.add(number)
        if len(self._recent) >= _MERGE_AT:
            self._merge()
        return True

    def _was_merged(self, number: np.uint64) -> bool:
        place = self._sorted.searchsorted(number)
        return bool(place < self._sorted.size and self._sorted[place] == number)

    def _merge(self) -> None:
        recent = np.fromiter(self._recent, np.uint64, len(self._recent))
        self._sorted = np.sort(np.concatenate([self._sorted, recent]))
        self._recent.clear()


class PairFilter:
    """Decides which pairs of one training corpus are kept; a pair is dropped for one reason only.

    Args:
      config: which filters are on.
      corpus: whose pairs they are; its languages say which scripts are right, its tag is not text.
      has_inputs: False for a language model, whose pairs have an empty source.
      seen: the pairs of earlier corpora, which count as duplicates; this corpus' pairs are added.

    Attributes:
      dropped: for each reason that occurred ("more than 100 words"), how often, with an example.

    Raises:
      UserError: `config.drop_wrong_script`, and nobody knows the script of a language.
    """

    def __init__(
        self,
        config: DataConfig,
        corpus: Corpus,
        has_inputs: bool = True,
        seen: SeenPairs | None = None,
    ):
        self.dropped: dict[str, Dropped] = {}
        self._tag = f"{corpus.tag} " if corpus.tag else ""
        self._checks = _checks(config, corpus, has_inputs, SeenPairs() if seen is None else seen)

    def keep(self, number: int, source: str, target: str) -> bool:
        """Whether the pair is kept; if it is not, it is counted in `dropped`.

        Args:
          number: of the pair in its corpus, from 1; examples name it.
          source: as `Corpus.pairs` gives it, with its tag.
          target: its translation.
        """
        text = source.removeprefix(self._tag)
        for reason, applies in self._checks:
            if applies(text, target):
                self._count(reason, number, text, target)
                return False
        return True

    def _count(self, reason: str, number: int, source: str, target: str) -> None:
        earlier = self.dropped.get(reason)
        if earlier is None:
            example = f"pair {number}: {_shortened(source)} | {_shortened(target)}"
            self.dropped[reason] = Dropped(1, example)
        else:
            self.dropped[reason] = dataclasses.replace(earlier, count=earlier.count + 1)


_Check = tuple[str, Callable[[str, str], bool]]


def _checks(config: DataConfig, corpus: Corpus, has_inputs: bool, seen: SeenPairs) -> list[_Check]:
    """The reasons to drop a pair and what finds them, in the order in which they are tried."""
    limit, ratio = config.max_words, config.max_length_ratio
    checks: dict[str, Callable[[str, str], bool]] = {}
    checks["empty side"] = _has_empty_side if has_inputs else _has_empty_target
    if limit:
        checks[f"more than {limit} words"] = lambda *pair: max(map(_words, pair)) > limit
    if ratio and has_inputs:
        checks[f"length ratio above {ratio:g}"] = lambda *pair: _length_ratio(*pair) > ratio
    if config.drop_identical and has_inputs:
        checks["identical sides"] = lambda source, target: source.strip() == target.strip()
    if config.drop_wrong_script:
        checks["wrong script"] = _script_check(corpus.languages, has_inputs)
    if config.drop_duplicates:
        # Last, since a pair that is dropped for another reason is not seen again in training.
        checks["duplicate"] = lambda *pair: not seen.add(*pair)
    return list(checks.items())


def _has_empty_side(source: str, target: str) -> bool:
    return not (source.strip() and target.strip())


def _has_empty_target(source: str, target: str) -> bool:
    return not target.strip()


def _script_check(languages: tuple[str, str], has_inputs: bool) -> Callable[[str, str], bool]:
    """What finds a pair of which a side is mostly not in the script of its language."""
    right_target = script_words(languages[1])
    if not has_inputs:
        return lambda source, target: not is_mostly_in(right_target, target)
    right_source = script_words(languages[0])
    return lambda source, target: (
        not (is_mostly_in(right_source, source) and is_mostly_in(right_target, target))
    )


def _words(text: str) -> int:
    return len(text.split())


def _length_ratio(source: str, target: str) -> float:
    """Words of the longer side over words of the shorter; neither is empty."""
    shorter, longer = sorted(map(_words, (source, target)))
    return longer / shorter


def _shortened(text: str) -> str:
    tidy = " ".join(text.split())
    return tidy if len(tidy) <= _EXAMPLE_LENGTH else f"{tidy[:_EXAMPLE_LENGTH]}..."


def script_words(language: str) -> tuple[str, ...]:
    """First words of the Unicode names of the letters that `language` is written with.

    The script is the one that the code names ("sr_Latn"), or else the usual one of the language
    (the likely subtags of the Unicode CLDR).

    Args:
      language: ISO 639 code, also with script and territory: "de", "deu", "zh_Hant", "pt-BR".

    Raises:
      UserError: there is no such language.
    """
    import babel
    from babel.core import get_global

    code, *subtags = language.replace("-", "_").split("_")
    code = get_global("language_aliases").get(code, code)
    likely = get_global("likely_subtags")
    full = likely.get("_".join([code, *subtags[:1]])) or likely.get(code, "")
    script = next((subtag for subtag in [*subtags, *full.split("_")[1:]] if len(subtag) == 4), "")
    name = babel.Locale("en").scripts.get(script)
    if name is None:
        raise UserError(
            f"data.drop_wrong_script: the script of language {language!r} is not known; name "
            "languages by their ISO 639 codes, or turn the filter off"
        )
    return _NAMES_OF_SCRIPTS.get(script, (name.split()[0].upper(),))


def is_mostly_in(script: tuple[str, ...], text: str) -> bool:
    """Whether at least half of the letters in `text` are of a script; so are no letters at all.

    Args:
      script: as `script_words` gives it.
      text: any text.
    """
    letters = right = 0
    for character, count in collections.Counter(text).items():
        word = _first_word(character)
        letters += count * bool(word)
        right += count * (word in script)
    return 2 * right >= letters


@functools.cache
def _first_word(character: str) -> str:
    """The first word of the Unicode name of a letter ("LATIN"); "" for other characters."""
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else ""
