"""Filters for training pairs, with the number of dropped pairs and an example for each reason.

    pair_filter = PairFilter(config.data, corpus)
    kept = [pair for number, pair in enumerate(corpus.pairs(), 1) if pair_filter.keep(number, pair)]
    report = {reason: dataclasses.asdict(d) for reason, d in pair_filter.dropped.items()}

Only training corpora are filtered, and the pairs that are held out of them: results on given
development and test sets must not depend on the options of a run.
"""

import collections
import dataclasses
import functools
import hashlib
import unicodedata
from collections.abc import Callable, Sequence

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Corpus, SentencePair
from flaxformer_mt.data.corpora.language_codes import parsed
from flaxformer_mt.data.corpora.languages import Identifier, are_similar
from flaxformer_mt.data.corpora.rows import Dropped, location_of
from flaxformer_mt.errors import UserError, requiring
from flaxformer_mt.writing_systems import count_words, has_visible

_EXAMPLE_LENGTH = 60  # Characters shown per side of an example.
_FEWEST_LETTER_BYTES = 20  # Of a sentence whose language is identified: 7 Chinese characters.

# First words of the Unicode names of a script's characters, where they differ from the English name
# of the script.
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

_OF_SEVERAL_SCRIPTS = ("IDEOGRAPHIC", "VERTICAL", "MODIFIER")
"""First words of the names of letters of more than one script: of 々 and 〆, 〻 and 〱, and ʼ."""


def pair_hash(source: str, target: str) -> int:
    """Returns a hash of a pair, from 0 to 2**64 - 1.

    The probability that two of 10 million distinct pairs have the same is 3 in a million.
    """
    digest = hashlib.blake2b(f"{source}\t{target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PairFilter:
    """The filters of one training corpus. A dropped pair counts for the first matching reason.

    `config.drop_duplicates` is not one of them: it depends on all pairs, see `token_store`.

    Args:
      config: options of the filters.
      corpus: its languages determine the expected scripts, and its tag is ignored.
      has_inputs: False for a language model, whose sources are empty.

    Attributes:
      dropped: the dropped pairs by reason, such as "more than 100 words".
    """

    def __init__(self, config: DataConfig, corpus: Corpus, has_inputs: bool = True):
        self.dropped: dict[str, Dropped] = {}
        self._tag = f"{corpus.tag} " if corpus.tag else ""
        self._checks = _checks(config, corpus, has_inputs)

    def keep(self, number: int, pair: SentencePair) -> bool:
        """Returns whether pair `number` of the corpus is kept, or else counts it in `dropped`."""
        source, target = pair
        text = source.removeprefix(self._tag)
        for reason, applies in self._checks.items():
            if applies(text, target):
                example = example_of(location_of(pair, number), text, target)
                earlier = self.dropped.get(reason, Dropped(0, example))
                self.dropped[reason] = dataclasses.replace(earlier, count=earlier.count + 1)
                return False
        return True


def options_in_use(config: DataConfig) -> str:
    """Returns the options of the filters that are on, with their values, for a message."""
    names = (
        "max_words",
        "max_length_ratio",
        "drop_identical",
        "drop_wrong_script",
        "drop_wrong_language",
        "drop_duplicates",
    )
    values = {name: getattr(config, name) for name in names}
    return ", ".join(f"data.{name}={value}" for name, value in values.items() if value)


def _checks(
    config: DataConfig, corpus: Corpus, has_inputs: bool
) -> dict[str, Callable[[str, str], bool]]:
    # In order of precedence.
    limit, ratio = config.max_words, config.max_length_ratio
    checks: dict[str, Callable[[str, str], bool]] = {}
    # The number of words is of several checks.
    words = functools.lru_cache(maxsize=2)(count_words)
    side = 0 if has_inputs else 1
    checks["empty side"] = lambda *pair: not all(map(has_visible, pair[side:]))
    if limit:
        checks[f"more than {limit} words"] = lambda *pair: max(map(words, pair)) > limit
    if ratio and has_inputs:
        checks[f"length ratio above {ratio:g}"] = lambda *pair: _ratio(*map(words, pair)) > ratio
    if config.drop_identical and has_inputs:
        checks["identical sides"] = lambda source, target: source.strip() == target.strip()
    if config.drop_wrong_script:
        checks["wrong script"] = _script_check(corpus.languages[side:], side)
    if config.drop_wrong_language:
        least = config.drop_wrong_language
        checks["wrong language"] = _language_check(corpus.languages[side:], side, least)
    return checks


def _script_check(languages: Sequence[str], side: int) -> Callable[[str, str], bool]:
    scripts = list(map(script_words, languages))
    return lambda *pair: not all(map(is_mostly_in, scripts, pair[side:]))


def _language_check(
    languages: Sequence[str], side: int, least: float
) -> Callable[[str, str], bool]:
    with requiring("data.drop_wrong_language", "'flaxformer_mt[demo]'"):
        identifier = Identifier(*languages)

    def is_wrong(expected: str, text: str) -> bool:
        if not expected or len("".join(filter(str.isalpha, text)).encode()) < _FEWEST_LETTER_BYTES:
            return False
        code, probability = identifier.identify(text)
        return probability >= least and not are_similar(code, expected)

    return lambda *pair: any(map(is_wrong, identifier.codes, pair[side:]))


def _ratio(first: int, second: int) -> float:
    return max(first, second) / min(first, second)


def example_of(location: str, source: str, target: str) -> str:
    """Describes a pair: its location and the beginnings of its sides."""
    return f"{location}: {shortened(source)} | {shortened(target)}"


def shortened(text: str) -> str:
    """Returns the beginning of a sentence, for an example."""
    text = " ".join(text.split())
    return text if len(text) <= _EXAMPLE_LENGTH else f"{text[:_EXAMPLE_LENGTH]}..."


def script_words(language: str) -> tuple[str, ...]:
    """Returns the first words of the Unicode character names of a language's script.

    The script is the one in the language code ("sr_Latn"), or else the default script of the
    language (from the likely subtags of the Unicode CLDR).
    """
    with requiring("data.drop_wrong_script", "'flaxformer_mt[demo]'"):
        import babel

    code = parsed(language)
    script = code.likely.script if code.is_known else code.script
    name = babel.Locale("en").scripts.get(script)
    if name is None:
        raise UserError(
            f"data.drop_wrong_script: the script of language {language!r} is unknown; use ISO 639 "
            "language codes, or turn the filter off"
        )
    return _NAMES_OF_SCRIPTS.get(script, (name.split()[0].upper(),))


def is_mostly_in(script: tuple[str, ...], text: str) -> bool:
    """Returns whether at least half of the letters of a text are in a script."""
    usual = _usual_characters(script)
    if usual.issuperset(text):
        return True
    letters = matching = 0
    for character, count in collections.Counter(text).items():
        word = _first_word(character)
        letters += count * bool(word)
        matching += count * (word in script)
        if not word or word in script:
            usual.add(character)
    return 2 * matching >= letters


@functools.cache
def _usual_characters(script: tuple[str, ...]) -> set[str]:
    """Returns the set of those seen so far that are of a script, or no letters; it grows."""
    return set()


@functools.cache
def _first_word(character: str) -> str:
    """Returns the first word of the Unicode name of a letter ("LATIN"); "" for non-letters.

    Half-width and full-width letters, and other forms of one that NFKC maps, are ordinary ones.
    """
    letter = unicodedata.normalize("NFKC", character)[:1]
    word = unicodedata.name(letter, "").partition(" ")[0] if letter.isalpha() else ""
    return "" if word in _OF_SEVERAL_SCRIPTS else word
