"""The code blocks of the documentation, and the commands in them.

A block's language says what it is: `sh` is commands; `console` is commands after "$ " with what
they print; `python` is a program or, after ">>> ", a session; and `text` is output or layout by
itself. A comment on the line above says why a block is not run (`<!-- not run: needs a GPU -->`),
which file it is (`<!-- file: serve.py -->`), or that the block before it prints it
(`<!-- output -->`).
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "console", "python", "text", "toml", "yaml"}
REASONS = {
    "needs a GPU",
    "needs a TPU",
    "needs published weights",
    "needs several machines",
    "needs a download",
    "takes hours",
    "takes half an hour",
    "takes minutes, and needs jax[cuda13]",
    "does not end",
    "needs a table with four columns",
    "needs your model",
    "needs a running server",
}
MIGRATION = ROOT / "docs/migration.md"
_FENCE = re.compile(r"```(\w*)$")
_COMMENT = re.compile(r"<!-- (not run|file|output)(?:: (.+))? -->$")


class Command(NamedTuple):
    """A command, and the lines that the page says it prints; None if it shows none."""

    text: str
    output: list[str] | None = None


class Block(NamedTuple):
    """A fenced block of code."""

    page: str
    number: int
    """Of the line with the fence, from 1."""
    language: str
    lines: list[str]
    reason: str | None
    """Why it is not run."""
    file: str | None
    """Name of the file that it is, which later commands run."""
    is_output: bool
    """Whether the last command before it, or the last Python, prints it, among other lines."""

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"

    def commands(self) -> list[Command]:
        """Returns the commands of a block of `sh` or `console`, without comments."""
        found: list[Command] = []
        lines = iter(self.lines)
        for line in lines:
            if self.language == "console" and not line.startswith("$ "):
                found[-1].output.append(line)
                continue
            text = line.removeprefix("$ ")
            while text.endswith("\\"):
                text = f"{text[:-1].rstrip()} {next(lines).lstrip()}"
            text = re.sub(r"(^|\s)#(?!SBATCH).*", "", text).strip()
            if text:
                found.append(Command(text, [] if self.language == "console" else None))
        return found


def blocks(path: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        fence = _FENCE.match(lines[index])
        if fence is not None:
            end = lines.index("```", index + 1)
            comment = _COMMENT.match(lines[index - 1])
            given = {comment[1]: comment[2]} if comment else {}
            page = path.relative_to(ROOT).as_posix()
            body = lines[index + 1 : end]
            found.append(
                Block(
                    page,
                    index + 1,
                    fence[1],
                    body,
                    reason=given.get("not run"),
                    file=given.get("file"),
                    is_output="output" in given,
                )
            )
            index = end
        index += 1
    return found


def prose(path: Path) -> str:
    """Returns the text of a page without its blocks, and without the options of other toolkits.

    These are the first column of the tables of docs/migration.md.
    """
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^\|.*? \| ", "| ", text, flags=re.M) if path == MIGRATION else text


BLOCKS = [block for page in PAGES for block in blocks(page)]
