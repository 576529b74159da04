"""Word alignments of sentence pairs, from files in Pharaoh format (`0-0 1-2`, source-target)."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from flaxformer_mt.data.corpora.rows import Row
from flaxformer_mt.data.corpora.text_files import stream_lines
from flaxformer_mt.errors import UserError

_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


class AlignedPair(Row):
    """A sentence pair with its line of an alignment file, which it keeps when others are dropped.

    Attributes:
      place: alignment file and number of the line.
      line: the line.
    """

    def __new__(cls, pair: tuple[str, str], place: str, line: str) -> "AlignedPair":
        """Makes a pair of a source and a target."""
        made = super().__new__(cls, pair)
        if isinstance(pair, Row):
            made.path, made.number = pair.path, pair.number
        made.place, made.line = place, line
        return made

    place: str
    line: str

    def links(self) -> list[tuple[int, int]]:
        """Returns the linked words, source and target, both counted from 0; checks the line."""
        sizes = [len(text.split()) for text in self]
        links = []
        for link in self.line.split():
            found = _LINK.fullmatch(link)
            if found is None:
                raise UserError(
                    f"{self.place}: {link!r} is not a link: the numbers of a source and a target "
                    "word, such as 0-0 1-2"
                )
            source, target = int(found[1]), int(found[2])
            if source >= sizes[0] or target >= sizes[1]:
                raise UserError(
                    f"{self.place}: the link {link} is beyond the words, {sizes[0]} of the source "
                    f"and {sizes[1]} of the target, counted from 0"
                )
            links.append((source, target))
        return links


def stream_aligned(
    rows: Iterator[tuple[str, str] | None], name: str, path: Path
) -> Iterator[AlignedPair | None]:
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
        yield row and AlignedPair(row, f"{path}, line {number + 1}", str(line))
