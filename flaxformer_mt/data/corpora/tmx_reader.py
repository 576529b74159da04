"""Reads the sentence pairs of a TMX file (Translation Memory eXchange 1.4b), as it arrives."""

import xml.parsers.expat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaxformer_mt.data.corpora import headers
from flaxformer_mt.data.corpora.text_files import explained, opened
from flaxformer_mt.errors import UserError

_CHUNK_BYTES = 2**16
_CODES = {"bpt", "ept", "it", "ph", "ut"}
"""Elements whose content is not text, but formatting."""


def stream_rows(path: Path, languages: tuple[str, str]) -> Iterator[tuple[int, list[str]]]:
    """Yields the line of each translation unit that has both languages, and their text.

    Entities that the file declares are refused: a small file can make them expand without limit.
    """
    units = _Units(path, languages)
    with opened(path) as file, explained(str(path)):
        found = False
        try:
            while chunk := file.read(_CHUNK_BYTES):
                units.parser.Parse(chunk)
                found = found or bool(units.complete)
                yield from units.complete
                units.complete.clear()
            units.parser.Parse(b"", True)
        except xml.parsers.expat.ExpatError as error:
            raise UserError(f"{path} is not TMX: {error}") from error
        except (LookupError, ValueError) as error:  # From Python, which expat asks for encodings.
            raise UserError(
                f"{path} has an encoding that is not read ({error}): convert it to UTF-8"
            ) from error
    if not found:
        raise UserError(
            f"{path} has no translation unit in {' and '.join(languages)}, only in "
            f"{', '.join(sorted(units.languages)) or 'no language'}"
        )


class _Units:
    """The handlers of a parser, which collect translation units."""

    def __init__(self, path: Path, languages: tuple[str, str]) -> None:
        self._path = path
        self.complete: list[tuple[int, list[str]]] = []
        self.languages: set[str] = set()
        self._wanted = languages
        self._line = 0
        self._language = ""
        self._texts: dict[str, str] = {}
        self._parts: list[str] | None = None
        self._codes = 0
        self.parser = xml.parsers.expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.EntityDeclHandler = self._entity

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self._line = self.parser.CurrentLineNumber
            self._texts = {}
        elif name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang", "")
            self.languages.add(self._language)
        elif name == "seg":
            self._parts = []
        self._codes += name in _CODES

    def _end(self, name: str) -> None:
        self._codes -= name in _CODES
        if name == "seg" and self._parts is not None:
            self._texts.setdefault(self._language, " ".join("".join(self._parts).split("\n")))
            self._parts = None
        elif name == "tu":
            sides = headers.sides_of([*self._texts], self._wanted)
            if sides is not None:
                texts = [*self._texts.values()]
                self.complete.append((self._line, [texts[side] for side in sides]))

    def _text(self, text: str) -> None:
        if self._parts is not None and not self._codes:
            self._parts.append(text)

    def _entity(self, name: str, *_: Any) -> None:
        raise UserError(f"{self._path} declares the entity {name}, which is not read")
