"""Splits input that is too long into segments, preferably at the ends of sentences.

A sentence that is still too long is split at commas and similar marks, then at spaces, then between
any two characters, so that every text becomes segments that fit. The time is about proportional to
the length of the text.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flaxformer_mt.writing_systems import CHARACTER, is_boundary

MeasureLengths = Callable[[Sequence[str]], list[int]]
"""Returns the number of tokens of each text."""

# Latin, Greek and Cyrillic, Armenian, Arabic and Urdu, Devanagari, Ethiopic, Khmer, Burmese,
# Tibetan, Chinese and Japanese: the commonly used characters of Unicode's Sentence_Terminal.
_ENDS = "!?.…\u203c\u2047\u2048\u2049։؟۔।॥።፧፨។៕။།"
_WIDE_ENDS = "。．！？｡"
_CLOSING = "\"'”“’‘»«›‹)\\]}」』）］】〉》"
_SENTENCE_END = re.compile(
    # In French, a space precedes the closing quotation mark.
    f"([{_ENDS}{_WIDE_ENDS}]+)[{_CLOSING}]*(?:[ \u00a0\u202f]»(?!\\w))?"
    "|[\r\x0b\x0c\x85\u2028\u2029]+"
)
# Possessive, and anchored at the first of several marks; otherwise a million commas take hours.
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
"""Abbreviations that end with a full stop inside a sentence; single letters are always such."""
_ABBREVIATION_SET = frozenset(_ABBREVIATIONS.split())
_MAX_ABBREVIATION_LENGTH = max(map(len, _ABBREVIATION_SET))


class Segment(NamedTuple):
    """A part of a text."""

    text: str
    inside_word: bool = False
    """Whether it begins inside a word of a script with spaces between words."""
    after_space: bool = True
    """Whether a space precedes it, or it is the beginning of the text."""


def split(text: str, limit: int, measure_lengths: MeasureLengths) -> list[Segment]:
    """Splits a text into its sentences, and those that are too long into smaller segments.

    `limit` is the maximum number of tokens of a segment; only a single character can have more. No
    segment is empty. Concatenated they are the text, except for spaces at their boundaries.
    """
    segments: list[Segment] = []
    end = 0
    for segment in _split_levels(text.strip(), limit, measure_lengths, _LEVELS):
        start = text.index(segment.text, end)
        segments.append(segment._replace(after_space=start > end or not segments))
        end = start + len(segment.text)
    return segments


def separators(translations: Sequence[str], segments: Sequence[Segment]) -> list[str]:
    """Returns what precedes the translation of each of a text's segments.

    It is a space, unless the segment begins inside a word or one of the characters adjacent to the
    space belongs to a script without spaces.
    """
    found: list[str] = []
    end = ""
    for translation, segment in zip(translations, segments, strict=True):
        is_joined = (
            not end or not translation or segment.inside_word or is_boundary(end, translation)
        )
        found.append("" if is_joined else " ")
        end = translation[-1:] or end
    return found


def sentences(text: str) -> list[str]:
    """Splits a text after the end of each sentence; concatenated, the parts are the text.

    A full stop does not end a sentence after an abbreviation or a number of one or two digits ("3.
    Mai"), nor if no space or a lower-case letter follows ("3.14", "e.g. this"). Marks that follow
    no word belong to the next sentence.
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
    before = text[max(0, start - _MAX_ABBREVIATION_LENGTH - 1) : start]
    return marks != "." or not _is_abbreviated(before)


def _is_abbreviated(before: str) -> bool:
    word = re.search(r"\w*$", before)[0].lower()  # type: ignore[index]  # "" always matches.
    return word in _ABBREVIATION_SET or (len(word) == 1 or (len(word) == 2 and word.isdecimal()))


def _clauses(text: str) -> list[str]:
    return _parts(text, (match.end() for match in _CLAUSE_END.finditer(text)))


def _words(text: str) -> list[str]:
    return _parts(text, (match.end() for match in _SPACE.finditer(text)))


def _parts(text: str, boundaries: Iterator[int]) -> list[str]:
    indices = [0, *boundaries, len(text)]
    parts = (text[start:end] for start, end in itertools.pairwise(indices))
    return [part for part in parts if part]


_LEVELS = (sentences, _clauses, _words)
"""How to split a text, in order of preference."""


def _split_levels(
    text: str,
    limit: int,
    measure_lengths: MeasureLengths,
    levels: Sequence[Callable[[str], list[str]]],
) -> Iterator[Segment]:
    if not levels:
        yield from _split_anywhere(Segment(text), limit, measure_lengths)
        return
    parts = levels[0](text)
    lengths = measure_lengths(parts)
    # Models are trained on sentences, which stay separate; smaller parts are merged.
    groups = [[part] for part in parts]
    if levels[0] is not sentences:
        groups = _merge_neighbors(parts, lengths, limit)
        lengths = measure_lengths(["".join(group) for group in groups])
    for group, length in zip(groups, lengths, strict=True):
        if length > limit and len(group) == 1:
            yield from _split_levels(group[0].strip(), limit, measure_lengths, levels[1:])
        else:
            # Merged neighbors may have more tokens than separate ones; they are not merged then.
            texts = group if length > limit else ["".join(group)]
            yield from (Segment(text.strip()) for text in texts if text.strip())


def _merge_neighbors(parts: Sequence[str], lengths: Sequence[int], limit: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for part, length in zip(parts, lengths, strict=True):
        if not groups or length > room:
            groups.append([])
            room = limit
        groups[-1].append(part)
        room -= length
    return groups


def _split_anywhere(
    segment: Segment, limit: int, measure_lengths: MeasureLengths
) -> Iterator[Segment]:
    (length,) = measure_lengths([segment.text])
    if length <= limit or len(segment.text) == 1:
        yield segment
        return
    size = math.ceil(len(segment.text) / math.ceil(length / limit))
    for start in range(0, len(segment.text), size):
        text = segment.text[start : start + size]
        inside_word = segment.inside_word if start == 0 else not CHARACTER.match(text)
        yield from _split_anywhere(Segment(text, inside_word), limit, measure_lengths)
