"""Recognizes by its bytes what a file holds: another format, an encoding, its line ends."""

import codecs
import unicodedata
from collections.abc import Callable
from pathlib import Path

from flaxformer_mt.data.corpora.rows import Fault
from flaxformer_mt.errors import UserError
from flaxformer_mt.writing_systems import has_visible

_TAR_MAGIC = slice(257, 262), b"ustar"
UNPACK = "unpack it, and name the file to read"
_NOT_TEXT = {
    b"PK\x03\x04": (
        "a ZIP archive or a document of an office program",
        "give an archive the suffix .zip, export a document as CSV",
    ),
    b"\x1f\x8b": ("compressed by gzip", "give it the suffix .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "give it the suffix .zst"),
    b"\xfd7zXZ\x00": ("compressed by xz", "give it the suffix .xz"),
    b"BZh91AY&SY": ("compressed by bzip2", "give it the suffix .bz2"),
    b"7z\xbc\xaf": ("a 7z archive", UNPACK),
    b"Rar!": ("a RAR archive", UNPACK),
    b"PAR1": ("a Parquet file", "give it the suffix .parquet"),
    b"%PDF-": ("a PDF document", "extract its text"),
    b"\xd0\xcf\x11\xe0": ("a document of an office program", "export it as CSV"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    codecs.BOM_UTF32_LE: ("UTF-32", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
    codecs.BOM_UTF32_BE: ("UTF-32", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
    codecs.BOM_UTF16_LE: ("UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
}
"""The first bytes of files that are not UTF-8 text: what they are, and what to do."""

_MARK = "\ufeff"
_BLANKS = (b"\n", b" ", b"\t")


def check_is_text(start: bytes, path: Path) -> None:
    """Raises `UserError` unless a file that starts like this may be lines of UTF-8."""
    where, magic = _TAR_MAGIC
    if start[where] == magic or path.suffix.lower() in (".tgz", ".tbz2", ".txz"):
        raise UserError(f"{path} is a tar archive, not a file of text: {UNPACK}")
    for beginning, (what, advice) in _NOT_TEXT.items():
        if start.startswith(beginning):
            raise UserError(f"{path} is {what}, not UTF-8 text: {advice}")
    if encoding := _wide_encoding(start):
        raise UserError(
            f"{path} is {encoding} without a byte order mark, not UTF-8 text: convert it to UTF-8: "
            f"iconv -f {encoding} -t UTF-8"
        )
    text = start.rstrip(b"\r")
    if text.count(b"\r") - text.count(b"\r\n") - text.count(b"\r\r\n") > text.count(b"\n"):
        raise UserError(
            rf"{path} has lines that end in CR alone: convert them: tr '\r' '\n' < {path.name}"
        )


def _wide_encoding(start: bytes) -> str:
    """Returns which UTF-16 or UTF-32 text without a mark is in; "" if it is in neither."""
    if b"\0" not in start:
        return ""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    blanks = sum(map(start.count, _BLANKS))
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(start)
        except UnicodeDecodeError:
            continue
        if any(unicodedata.category(c)[0] == "C" and c not in "\n\r\t\ufeff" for c in text):
            continue
        # Blanks of UTF-16 have a NUL each, those of UTF-8 with a stray one do not.
        if not is_utf8 or 2 * sum(text.count(blank.decode()) for blank in _BLANKS) > blanks:
            return encoding
    return ""


def clean(line: str, tell: Callable[[str], object] = lambda text: None) -> str | Fault:
    """Returns a line without its end and a byte order mark, or what is wrong with it.

    A line break within it becomes a space. A line of NULs and invisible characters is "". `tell`
    gets what is to be said of the marks.
    """
    line = line.rstrip("\r")
    if "\0" in line:
        if not has_visible(line):
            return ""
        where = f" (character {line.index(chr(0)) + 1} of the line)"
        return Fault("a NUL character", where, r"remove it: tr -d '\000'")
    if line.startswith(_MARK):
        line = line.lstrip(_MARK)
        tell("begins with a byte order mark, as where files are joined: such marks are left out")
    elif _MARK in line:
        tell("has a byte order mark within it, as where a file without a last line end is joined")
    return line.replace("\r", " ")
