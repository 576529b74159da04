"""Input that is too long, in pieces that are not: at the ends of sentences where that is enough.

What is still too long is divided at commas and the like, then at spaces, then anywhere, so that any
text, however long and however strange, becomes pieces that fit; in time about proportional to its
length.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MeasureLengths = Callable[[Sequence[str]], list[int]]
"""Tokens of each text."""

# Latin, Greek and Cyrillic, Armenian, Arabic and Urdu, Devanagari, Ethiopic, Khmer, Burmese,
# Tibetan, Chinese and Japanese: what Unicode calls Sentence_Terminal, where it is in common use.
_ENDS = "!?.…\u203c\u2047\u2048\u2049։؟۔।॥።፧፨។៕။།"
_WIDE_ENDS = "。．！？｡"
_CLOSING = "\"'”“’‘»«›‹)\\]}」』）］】〉》"
_SENTENCE_END = re.compile(
    # French has a space before its closing quotation marks.
    f"([{_ENDS}{_WIDE_ENDS}]+)[{_CLOSING}]*(?:[ \u00a0\u202f]»(?!\\w))?"
    "|[\r\x0b\x0c\x85\u2028\u2029]+"
)
# Possessive, and only from the first of several marks on: a million commas would else take hours.
_CLAUSE_END = re.compile(
    f"(?<![,;:،؛၊])[,;:،؛၊]++[{_CLOSING}]*+(?=\\s)|[，、；：—]+|(?<=\\s)[-–](?=\\s)"
)
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"\w")

_ABBREVIATIONS = """
abb abs al approx art aug bd bsp bspw bzw ca cf ch chap co corp dec dept dr ed eds eq et etc evtl ex
feb fig figs fr ggf gen geb hr hrsg inc inkl jan jr kap lt ltd m max mio min mlle mme mr mrd mrs ms
mt nov no nos nr oct op p pp prof resp rev s sec sen sep sept sr st str tab tel u usw vgl viz vol vs
z zzgl г им проф см ср стр т ул
"""
"""What is written with a full stop inside a sentence; a single letter always is."""
_KNOWN = frozenset(_ABBREVIATIONS.split())
_LONGEST = max(map(len, _KNOWN))

# Scripts that put no space between words: Thai, Lao, Burmese, Khmer, Tibetan; Chinese and Japanese
# with their punctuation and full-width forms. (Korean has spaces.)
_SPACELESS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff00-\uffef\U00020000-\U0003ffff]"
)


class Piece(NamedTuple):
    """A part of a text."""

    text: str
    inside_word: bool = False
    """Whether it begins inside a word of a script that puts spaces between words."""


def split(text: str, limit: int, measure_lengths: MeasureLengths) -> list[Piece]:
    """Divides a text into its sentences, and those that are too long further.

    Args:
      text: of any length.
      limit: the most tokens that a piece may have. Only a single character can have more.
      measure_lengths: tells the number of tokens of texts.

    Returns:
      The pieces, none of them empty; together they are the text but for spaces at their borders.
    """
    return list(_divided(Piece(text.strip()), limit, measure_lengths, _LEVELS))


def join(translations: Sequence[str], pieces: Sequence[Piece]) -> str:
    """The translations of a text's pieces as one text.

    Between two of them is a space, unless the piece began inside a word or one of the characters
    that would be next to the space belongs to a script that has none.
    """
    joined: list[str] = []
    end = ""
    for translation, piece in zip(translations, pieces, strict=True):
        if not translation:
            continue
        spaceless = _SPACELESS.match(end) or _SPACELESS.match(translation)
        if joined and not piece.inside_word and not spaceless:
            joined.append(" ")
        joined.append(translation)
        end = translation[-1]
    return "".join(joined)


def sentences(text: str) -> list[str]:
    """The text after each end of a sentence, including it, up to the next.

    A full stop is none after an abbreviation or a number of one or two digits ("3. Mai"), nor
    where no space or a small letter follows ("3.14", "e.g. this"). Marks without a word before
    them are part of the sentence that follows.
    """
    return _parts(text, _sentence_ends(text))


def _sentence_ends(text: str) -> Iterator[int]:
    seen, has_word = 0, False
    for match in _SENTENCE_END.finditer(text):
        has_word = has_word or bool(_WORD.search(text, seen, match.start()))
        seen = match.end()
        if has_word and _is_end(text, match):
            yield seen
            has_word = False


def _is_end(text: str, match: re.Match[str]) -> bool:
    marks = match[1]
    if marks is None or any(mark in _WIDE_ENDS for mark in marks):
        return True
    following = text[match.end() : match.end() + 2]
    if not following[:1].isspace() or following[1:].islower():
        return False
    start = match.start()
    before = text[max(0, start - _LONGEST - 1) : start]
    return marks != "." or not _is_abbreviated(before)


def _is_abbreviated(before: str) -> bool:
    """Whether a full stop after this belongs to its last word alone."""
    word = re.search(r"\w*$", before)[0].lower()  # type: ignore[index]  # "" always matches.
    return word in _KNOWN or (len(word) == 1 or (len(word) == 2 and word.isdecimal()))


def _clauses(text: str) -> list[str]:
    return _parts(text, (match.end() for match in _CLAUSE_END.finditer(text)))


def _words(text: str) -> list[str]:
    return _parts(text, (match.end() for match in _SPACE.finditer(text)))


def _parts(text: str, borders: Iterator[int]) -> list[str]:
    """The text between the borders; joined they are the text."""
    places = [0, *borders, len(text)]
    parts = (text[start:end] for start, end in itertools.pairwise(places))
    return [part for part in parts if part]


_LEVELS = (sentences, _clauses, _words)
"""Where to divide, the best places first."""


def _divided(
    piece: Piece,
    limit: int,
    measure_lengths: MeasureLengths,
    levels: Sequence[Callable[[str], list[str]]],
) -> Iterator[Piece]:
    if not levels:
        yield from _cut(piece, limit, measure_lengths)
        return
    parts = levels[0](piece.text)
    lengths = measure_lengths(parts)
    # Sentences are what a model has learned to translate; smaller parts are worth more together.
    groups = [[part] for part in parts]
    if levels[0] is not sentences:
        groups = _grouped(parts, lengths, limit)
        lengths = measure_lengths(["".join(group) for group in groups])
    inside_word = piece.inside_word
    for group, length in zip(groups, lengths, strict=True):
        if length > limit and len(group) == 1:
            yield from _divided(
                Piece(group[0].strip(), inside_word), limit, measure_lengths, levels[1:]
            )
        else:
            # Where neighbours have more tokens together than apart, they stay apart.
            texts = group if length > limit else ["".join(group)]
            yield from (Piece(text.strip(), inside_word) for text in texts if text.strip())
        inside_word = False


def _grouped(parts: Sequence[str], lengths: Sequence[int], limit: int) -> list[list[str]]:
    """Neighbours together, as many as have at most `limit` tokens."""
    groups: list[list[str]] = []
    room = 0
    for part, length in zip(parts, lengths, strict=True):
        if not groups or length > room:
            groups.append([])
            room = limit
        groups[-1].append(part)
        room -= length
    return groups


def _cut(piece: Piece, limit: int, measure_lengths: MeasureLengths) -> Iterator[Piece]:
    """Equal numbers of characters, so few that each part fits."""
    (length,) = measure_lengths([piece.text])
    if length <= limit or len(piece.text) == 1:
        yield piece
        return
    size = math.ceil(len(piece.text) / math.ceil(length / limit))
    for start in range(0, len(piece.text), size):
        text = piece.text[start : start + size]
        inside_word = piece.inside_word if start == 0 else not _SPACELESS.match(text)
        yield from _cut(Piece(text, inside_word), limit, measure_lengths)
