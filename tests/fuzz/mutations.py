"""Damage to bytes, to files and to JSON values, with a description of each."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = "9" * 5_000
RAW = {
    "deep": DEEP,
    "thousand": "[" * 1000 + "]" * 1000,
    "long": LONG_NUMBER,
    "nan": "NaN",
    "inf": "Infinity",
    "minus": "-Infinity",
}
"""JSON texts that Python's `json.dumps` does not write for a usual value."""
JSON_VALUES = (
    None, True, False, "", "x", "nan", "\x00", [], {}, [1], [[]], {"a": 1}, -1, 0, 1, 3, 2.5, 1e-9,
    10**9, 2**31, 2**63, 10**20, 1e20, 1e308, -1e308, 5e-324, *(f"@{name}@" for name in RAW),
)  # fmt: skip
"""Replacements of a value; those in @ stand for the texts of `RAW`."""
NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "1", "0.5", "1e-9", "1e9", "1000000000", "1e20", str(10**20),
    "2147483648", str(2**63), "1e400", "-0.0", "0x10", "1_000", "١", "", " 3", "3 ", "+1", "None",
    "true", "x", "9" * 5000,
)  # fmt: skip
"""Values of an option that may or may not be numbers."""


def damage_bytes(rng: random.Random, content: bytes, other: bytes = b"") -> tuple[bytes, str]:
    """Returns damaged content and what was done."""
    ways = ["flip", "flip", "flip", "truncate", "empty", "append", "zero", "delete byte", "other"]
    way = rng.choice([*ways, "encode"])
    if not content or way == "append":
        extra = rng.randbytes(rng.choice((1, 8, 300)))
        return content + extra, f"append {extra[:20].hex()}"
    if way == "encode":
        codec = rng.choice(("utf-7", "utf-8-sig", "utf-16", "utf-32", "cp037"))
        return content.decode(errors="replace").encode(codec, "replace"), f"encode in {codec}"
    place = rng.randrange(len(content))
    if way == "flip":
        bit = rng.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        return bytes(damaged), f"flip bit {bit} of byte {place}"
    if way == "truncate":
        return content[:place], f"truncate to {place} bytes"
    if way == "zero":
        size = min(rng.choice((1, 16, 512)), len(content) - place)
        return content[:place] + bytes(size) + content[place + size :], f"zero {place}+{size}"
    if way == "delete byte":
        return content[:place] + content[place + 1 :], f"remove byte {place}"
    return (other, "replace by another file") if way == "other" else (b"", "empty")


def damage_file(rng: random.Random, path: Path, outside: Path, other: Path) -> str:
    """Damages a file, if it is JSON mostly in its values.

    Args:
      rng: makes the choices.
      path: the file.
      outside: a folder outside of the folder that is damaged.
      other: a file that may take its place.

    Returns:
      What was done.
    """
    if path.suffix == ".json" and rng.random() < 0.6:
        text, done = mutate_json(rng, json.loads(path.read_text()))
        replace_file(path, text.encode(errors="surrogatepass"))
        return f"{done} in {path.name}"
    if rng.random() < 0.25:
        return f"{damage_entry(rng, path, outside)}: {path.name}"
    content, done = damage_bytes(rng, path.read_bytes(), other.read_bytes())
    replace_file(path, content)
    return f"{done} ({other.name}) in {path.name}"


def damage_entry(rng: random.Random, path: Path, outside: Path) -> str:
    """Replaces a file by something that is no such file, and returns what was done.

    Args:
      rng: makes the choice.
      path: the file.
      outside: a folder outside of the folder that is damaged.
    """
    way = rng.choice(("delete", "folder", "fifo", "loop", "dangling", "link", "null"))
    content = path.read_bytes()
    path.unlink()
    match way:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to(outside / "missing")
        case "link":
            outside.mkdir(exist_ok=True)
            (outside / path.name).write_bytes(content)
            path.symlink_to(outside / path.name)
        case "null":
            path.symlink_to("/dev/null")
    return f"replace by: {way}"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in nested JSON, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from leaves(item, (*path, key))


def mutate_json(rng: random.Random, value: Any) -> tuple[str, str]:
    """Returns mutated JSON text, and what was done."""
    value = json.loads(json.dumps(value))
    where = rng.choice(list(leaves(value)))
    parent = value
    for key in where[:-1]:
        parent = parent[key]
    match rng.choice(("replace",) * 7 + ("delete", "rename", "add", "duplicate")):
        case "replace":
            parent[where[-1]] = rng.choice(JSON_VALUES)
            done = f"{where} = {parent[where[-1]]!r}"
        case "delete":
            del parent[where[-1]]
            done = f"delete {where}"
        case "duplicate" if isinstance(parent, dict):
            key = f"{json.dumps(where[-1])}:"
            return json_text(value).replace(key, f"{key} 0, {key}", 1), f"two {where}"
        case "rename" if isinstance(parent, dict):
            parent[f"{where[-1]}x"] = parent.pop(where[-1])
            done = f"rename {where}"
        case _:
            value["unknown"] = rng.choice(JSON_VALUES)
            done = f"unknown = {value['unknown']!r}"
    return json_text(value), done


def json_text(value: Any) -> str:
    """Returns JSON in which the texts of `RAW` stand instead of their names."""
    text = json.dumps(value, indent=2)
    for name, raw in RAW.items():
        text = text.replace(f'"@{name}@"', raw)
    return text


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file anew, so that a link to the old one is not written through."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
