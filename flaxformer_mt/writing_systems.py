"""Text in scripts that do not separate words by spaces, which no language code has to tell.

And text in no script at all: of invisible characters.
"""

import re
from collections.abc import Iterator, Sequence

HAN = "\u2e80-\u2fdf\u3005-\u3007\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, of Chinese, Japanese and Vietnamese, with the iteration marks."""

_KANA_AND_OTHERS = "\u3031-\u3035\u303c\u3040-\u312f\u31a0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f"
# Thai, Lao and Tibetan; Burmese; Khmer; Tai Le, New Tai Lue and Khmer symbols; Tai Tham; Balinese;
# Yi; Javanese and Burmese; Burmese and Tai Viet.
_ALPHABETIC = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua000-\ua4cf"
    "\ua980-\ua9ff\uaa60-\uaadf"
)
LETTERS = HAN + _KANA_AND_OTHERS + _ALPHABETIC
"""The letters of these scripts, for a class of a regular expression. (Korean has spaces.)"""

CHARACTER = re.compile(f"[{LETTERS}\u3000-\u303f\uff00-\uffef]")
"""Matches a letter of these scripts, or their punctuation and full-width forms."""

_HAN = re.compile(f"[{HAN}]")
_LETTER = re.compile(f"[{LETTERS}]")
_LONGEST_WORD = 6
"""Mean number of letters per space above which text that has spaces is not divided into words."""
_LETTERS_PER_WORD = 2, 4
"""Of Chinese and Japanese, and of the alphabetic scripts; about the mean of their words."""
_IDEOGRAPHIC = re.compile(f"[{HAN}{_KANA_AND_OTHERS}]")
_SPACED_WORD = re.compile(r"[^ \t]+")
_SEQUENCE = re.compile(f"[{LETTERS}]+")


INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff"
)
"""Unicode's Default_Ignorable_Code_Point, as the ranges of a set in a regular expression."""
has_visible = re.compile(rf"[^\s\x00-\x1f\x7f-\x9f{INVISIBLE}]").search
"""Finds a character that is not white space, a control or invisible (as U+200B, U+FEFF)."""


def stripped(text: str) -> str:
    """Returns a sentence without outer spaces; "" if all of its characters are invisible."""
    return text.strip() if has_visible(text) else ""


def separated(text: str) -> str:
    """Returns a text with spaces around each letter of these scripts."""
    return _LETTER.sub(r" \g<0> ", text)


def is_spaceless(text: str) -> bool:
    """Returns whether most letters of a sentence are of these scripts."""
    letters = "".join(filter(str.isalpha, text))
    return 2 * len(_LETTER.findall(letters)) > len(letters)


def han_share(texts: Sequence[str]) -> float:
    """Returns the share of Chinese characters among the letters of these scripts."""
    letters = "".join(texts)
    return len(_HAN.findall(letters)) / max(len(_LETTER.findall(letters)), 1)


def is_unsegmented(text: str) -> bool:
    """Returns whether a sentence is of these scripts, and spaces do not separate its words."""
    if not is_spaceless(text):
        return False
    count = len(text.split())
    return count == 1 or len(_LETTER.findall(text)) > _LONGEST_WORD * count


def spaced_words(text: str) -> list[str]:
    """Returns the words that links of alignments number: what is between spaces and tabs.

    Other spaces, such as U+00A0 in numbers, are part of a word, as in fast_align and Moses.
    """
    return _SPACED_WORD.findall(text)


def is_boundary(before: str, after: str) -> bool:
    """Returns whether two adjacent texts have no word in common although no space separates them.

    That is the case if one of the adjacent characters is of these scripts.
    """
    return bool(CHARACTER.match(before[-1:]) or CHARACTER.match(after))


def count_words(text: str) -> int:
    """Returns the number of words: between spaces, and estimated from the number of letters."""
    parts = text.split()
    is_spaced = text.isascii() or not _LETTER.search(text)
    return len(parts) if is_spaced else sum(map(_words_of, parts))


def _words_of(part: str) -> int:
    letters = len(_LETTER.findall(part))
    if not letters:
        return 1
    ideographs = len(_IDEOGRAPHIC.findall(part))
    of_ideographs, of_others = _LETTERS_PER_WORD
    estimated = ideographs / of_ideographs + (letters - ideographs) / of_others
    others = any(re.search(r"\w", other) for other in _SEQUENCE.split(part))
    return max(1, round(estimated) + others)


def evenly_spaced(texts: Sequence[str], count: int = 1000) -> Iterator[str]:
    """Yields at least `count` of the texts, or all, by which a large corpus is judged."""
    return iter(texts[:: max(1, len(texts) // count)])
