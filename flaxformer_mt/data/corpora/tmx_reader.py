"""Reads the sentence pairs of a TMX file (Translation Memory eXchange 1.4b), as it arrives."""

import collections
import functools
import html.entities
import xml.parsers.expat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flaxformer_mt.data.corpora.language_codes import chosen, distance, parsed
from flaxformer_mt.data.corpora.rows import LINE_BREAKS, Fault, Reading
from flaxformer_mt.data.corpora.text_files import explained, opened
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import has_visible

_CHUNK_BYTES = 2**16
_CODES = {"bpt", "ept", "it", "ph", "ut"}
"""Elements whose content is not text, but formatting."""


def stream_rows(
    path: Path, languages: Sequence[str], reading: Reading
) -> Iterator[tuple[int, list[str]]]:
    """Yields the line of each translation unit that has both languages, and their text.

    The variants of a unit are those that fit the languages best, see `language_codes`. The other
    units are counted in the reading, by reason. Entities that the file declares are refused: a
    small file can make them expand without limit.
    """
    units = _Units(path, languages, reading)
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
            raise UserError(
                f"{path} is not TMX: {error}: correct it there; or, if it is not in the encoding "
                "that its first line names, convert it to UTF-8"
            ) from error
        except (LookupError, ValueError) as error:  # From Python, which expat asks for encodings.
            raise UserError(
                f"{path} has an encoding that is not read ({error}): convert it to UTF-8"
            ) from error
    for wanted, code in units.guessed.items():
        reading.remark(f"{path}: text in {code} is taken for {wanted}: it may be in another script")
    if not found:
        unused = "".join(f"; {count:,} {kind}" for kind, count in units.unused.items())
        raise UserError(
            f"{path} has no translation unit in {' and '.join(languages)}, only in "
            f"{', '.join(sorted(units.languages)) or 'no language'}{unused}: name the languages "
            "as the file does (data.source_language, data.target_language)"
        )


class _Units:
    """The handlers of a parser, which collect translation units."""

    def __init__(self, path: Path, languages: Sequence[str], reading: Reading) -> None:
        self._path = path
        self._reading = reading
        self.complete: list[tuple[int, list[str]]] = []
        self.languages: set[str] = set()
        self.unused: collections.Counter[str] = collections.Counter()
        self.guessed: dict[str, str] = {}
        """Codes without a script, by the wanted ones that they are taken for."""
        self._wanted = languages
        self._chosen = functools.cache(self._choose)
        self._line = 0
        self._variants: list[tuple[str, str | None]] = []
        """The language of each variant and its text, None without a segment."""
        self._parts: list[str] | None = None
        self._codes = 0
        self.parser = xml.parsers.expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.EntityDeclHandler = self._entity
        self.parser.SkippedEntityHandler = self._skipped

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(":")[2]
        if name == "tu":
            self._line = self.parser.CurrentLineNumber
            self._variants = []
        elif name == "tuv":
            given = {key.lower(): value for key, value in attributes.items()}
            self._variants.append((given.get("xml:lang") or given.get("lang", ""), None))
        elif name == "seg":
            self._parts = []
        self._codes += name in _CODES

    def _end(self, name: str) -> None:
        name = name.rpartition(":")[2]
        self._codes -= name in _CODES
        if name == "seg" and self._parts is not None:
            if self._variants and self._variants[-1][1] is None:
                text = LINE_BREAKS.sub(" ", "".join(self._parts))
                self._variants[-1] = self._variants[-1][0], text
            self._parts = None
        elif name == "tu":
            self._add()

    def _add(self) -> None:
        """Adds the unit that ends, or counts why it is not used."""
        texts = [(code, text) for code, text in self._variants if text and has_visible(text)]
        sides = self._chosen(tuple(code for code, _ in texts))
        if sides is not None:
            self.complete.append((self._line, [texts[side][1] for side in sides]))
            return
        codes = tuple(code for code, _ in self._variants)
        self.languages.update(codes)
        sides = self._chosen(codes)
        if sides is None:
            fits = [chosen(codes, [language]) is not None for language in self._wanted]
            absent = [code for code, is_in in zip(self._wanted, fits, strict=True) if not is_in]
            only = ", ".join(codes) or "no language"
            fault = Fault(
                f"units without {' and '.join(absent or self._wanted)}", f" (only {only})"
            )
        elif any(self._variants[side][1] is None for side in sides):
            fault = Fault("units without <seg>")
        else:
            fault = Fault("units with an empty <seg>")
        self.unused[fault.kind] += 1
        self._reading.leave_out(self._path, self._line, fault)

    def _choose(self, codes: tuple[str, ...]) -> tuple[int, ...] | None:
        sides = chosen(codes, self._wanted)
        for wanted, side in zip(self._wanted, sides or (), strict=False):
            if (distance(parsed(wanted), parsed(codes[side])) or (0,))[0]:
                self.guessed[wanted] = codes[side]
        return sides

    def _text(self, text: str) -> None:
        if self._parts is not None and not self._codes:
            self._parts.append(text)

    def _entity(self, name: str, *_: Any) -> None:
        raise UserError(
            f"{self._path} declares the entity {name}, which is not read: replace it by its text"
        )

    def _skipped(self, name: str, is_parameter: bool) -> None:
        """Reads an entity that is declared in a file of its own, as those of HTML are."""
        if is_parameter:
            return
        if f"{name};" not in html.entities.html5:
            self._entity(name)
        self._text(html.entities.html5[f"{name};"])
