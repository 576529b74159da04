"""HTML tables."""

from collections.abc import Iterable, Sequence
from html import escape


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table that scrolls where it is too wide; the first cell of a row is its head."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(_row(*row) for row in rows)
    return (
        '<div class="scroll" role="region" aria-label="Table" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _row(head: str, *cells: str) -> str:
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(head)}</th>{columns}</tr>\n'
