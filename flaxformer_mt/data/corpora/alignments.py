"""Word alignments of sentence pairs, from files in Pharaoh format (`0-0 1-2`, source-target)."""

import itertools
import operator
import re
from collections.abc import Iterator
from pathlib import Path

from flaxformer_mt.data.corpora.rows import with_field
from flaxformer_mt.data.corpora.text_files import stream_lines
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import spaced_words

_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


FIELD = "links"
"""The field of rows that holds a line of an alignment file: its location and the text."""


class BeyondWordsError(UserError):
    """A link has the number of a word that its text does not have."""


def links_of(texts: tuple[str, str], location: str, line: str) -> list[tuple[int, int]]:
    """Returns the linked words of a pair, see `spaced_words`, both from 0; checks the line."""
    sizes = [len(spaced_words(text)) for text in texts]
    links = []
    for link in line.split():
        found = _LINK.fullmatch(link)
        if found is None:
            raise UserError(
                f"{location}: {link!r} is not a link: the numbers of a source and a target "
                "word, such as 0-0 1-2"
            )
        links.append((int(found[1]), int(found[2])))
        if any(map(operator.ge, links[-1], sizes)):
            others = any(size < len(text.split()) for size, text in zip(sizes, texts, strict=True))
            hint = ": replace other spaces than U+0020, which are part of a word" if others else ""
            raise BeyondWordsError(
                f"{location}: the link {link} is beyond the words, {sizes[0]} of the source "
                f"and {sizes[1]} of the target, counted from 0{hint}"
            )
    return links


def stream_aligned(
    rows: Iterator[tuple[str, str] | None], name: str, path: Path
) -> Iterator[tuple[str, str] | None]:
    """Yields the rows of the corpus `name` with the lines of its alignment file.

    Raises:
      UserError: the file has another number of lines than the corpus has rows.
    """
    lines = stream_lines(path)
    end = ("", "")
    for number, (row, line) in enumerate(itertools.zip_longest(rows, lines, fillvalue=end)):
        if row is end or line is end:
            counts = [number + (row is not end), number + (line is not end)]
            counts = [
                count + sum(1 for _ in rest)
                for count, rest in zip(counts, (rows, lines), strict=True)
            ]
            raise UserError(
                f"{path} has {counts[1]} lines, but {name} has {counts[0]} pairs: each line must "
                "have the links of one pair"
            )
        yield row and with_field(row, FIELD, (f"{path}, line {number + 1}", str(line)))
