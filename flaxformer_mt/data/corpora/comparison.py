"""Text as it is compared, to find sentences that occur in several corpora.

Texts are equal if they are so in NFKC, with folded case, single spaces and no punctuation, format
characters or other invisible ones. Tags before them, such as "<2de>", do not count. It takes many
texts at once: one by one, it would take several times as long.
"""

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flaxformer_mt.writing_systems import INVISIBLE

_CHUNK = 500  # Texts.
_is_invisible = re.compile(f"[{INVISIBLE}]").match
_TAGS = re.compile(r"^(?:(?:<[^<>\s]+>[^\S\n]+|>>[^<>\s]+<<[^\S\n]*)+)(?=\S)", re.MULTILINE)
"""Tags before text."""
_UNKNOWN, _REMOVED = 2**32 - 1, 2**32 - 2

_CHARACTERS = np.full(0x110000, _UNKNOWN, np.uint32)
"""What each character becomes, as far as it has been met."""
_CHARACTERS[ord("\n")] = ord("\n")


def comparable(texts: Sequence[str]) -> list[str]:
    """Returns texts as they are compared.

    A text of nothing but punctuation, such as "?!", keeps it; one of blanks and format characters
    alone becomes "".
    """
    if not texts:
        return []
    joined = "\n".join(texts)
    if joined.count("\n") >= len(texts):
        joined = "\n".join(text.replace("\n", " ") for text in texts)
    joined = _spaced(_TAGS.sub("", joined))
    if joined.isascii():
        joined = joined.casefold()
    else:
        joined = _spaced(_folded(joined))
    while "  " in joined:
        joined = joined.replace("  ", " ")
    joined = joined.replace(" \n", "\n").replace("\n ", "\n").strip(" ")
    return [
        compared or _without_blanks(text)
        for compared, text in zip(joined.split("\n"), texts, strict=True)
    ]


def hashed(texts: Sequence[str]) -> np.ndarray:
    """Returns a hash of each text as it is compared, uint64 [texts]; 0 for ""."""
    compared = comparable(texts)
    digests = [
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        for text in compared
    ]
    hashes = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
    return np.where([text != "" for text in compared], hashes, np.uint64(0))


def in_chunks(pairs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yields as many pairs as are best compared at once."""
    rest = iter(pairs)
    while chunk := list(itertools.islice(rest, _CHUNK)):
        yield chunk


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _spaced(text: str) -> str:
    """Removes format characters, and makes all punctuation and blanks but line feeds spaces."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kept = _CHARACTERS[codes]
    unknown = kept == _UNKNOWN
    if unknown.any():
        for code in np.unique(codes[unknown]):
            category = unicodedata.category(chr(code))
            spaced = ord(" ") if category[0] in "PZC" else code
            is_removed = category == "Cf" or _is_invisible(chr(code))
            _CHARACTERS[code] = _REMOVED if is_removed else spaced
        kept = _CHARACTERS[codes]
    return kept[kept != _REMOVED].tobytes().decode("utf-32-le", "surrogatepass")


def _without_blanks(text: str) -> str:
    folded = _folded(text)
    kept = (c for c in folded if unicodedata.category(c)[0] not in "ZC" and not _is_invisible(c))
    return "".join(kept)
