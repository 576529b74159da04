"""What the generators have found before, literally: every case is refused in one line."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from fuzz.core import Case
from fuzz.foreign_folders import read_arrays
from fuzz.mutations import flipped, replace_file
from fuzz.world import CONFIG, World

Change = Callable[[Path], object]


@dataclasses.dataclass(frozen=True)
class Literal:
    """A command on one changed file; {run}, {folder}, ... stand for the paths of a `World`."""

    arguments: tuple[str, ...]
    message: str
    """A part of the message."""
    file: str = ""
    """The file, in the folder of the case; its first part names what is copied there."""
    change: Change = Path.unlink
    stdin: bytes = b""

    @property
    def needs_a_run(self) -> bool:
        """Whether a model is trained, converted or saved before."""
        return self._uses("run") or self.file.startswith(("run/", "marian/", "flaxformer_mt."))

    def case(self, world: World, folder: Path) -> Case:
        """Returns the case, whose files are in `folder`."""
        if self.file:
            self._copy(world, folder)
            self.change(folder / self.file)
        paths = {
            name: getattr(world, name) for name in ("lines", "text", "run") if self._uses(name)
        }
        paths |= {"folder": folder}
        if (folder / "run").is_dir():
            paths["run"] = folder / "run"
        given = [each.format(**paths) for each in self.arguments]
        if given[0] == "train":
            given += world.training(folder / "output", self._text(folder))[1:]
            given += ["--dry-run"]
        return Case(
            self.file, tuple(given), self.stdin, names=(self.message,), check=lambda _: "accepted"
        )

    def _uses(self, name: str) -> bool:
        return any(f"{{{name}}}" in each for each in self.arguments)

    def _text(self, folder: Path) -> Path | None:
        return folder / "text" if (folder / "text").is_dir() else None

    def _copy(self, world: World, folder: Path) -> None:
        name = self.file.split("/")[0]
        if name in ("run", "text", "marian", "native"):
            shutil.copytree(getattr(world, name), folder / name)
        for path in world.checkpoints.values() if name.endswith(".safetensors") else ():
            if path.name == name:
                shutil.copy(path, folder)


def written(content: bytes) -> Change:
    return lambda path: path.write_bytes(content)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def bit(place: int, number: int) -> Change:
    return lambda path: replace_file(path, flipped(path.read_bytes(), place, number))


def edited(old: str, new: str) -> Change:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text
        replace_file(path, text.replace(old, new, 1).encode())

    return change


def setting(name: str, value: Any) -> Change:
    """Sets an entry of a JSON object."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


def blank(path: Path) -> None:
    path.write_bytes(b"\n" * path.read_bytes().count(b"\n"))


def not_a_number(name: str) -> Change:
    """Puts a NaN into an array of a safetensors file, or of an .npz."""

    def change(path: Path) -> None:
        if path.suffix == ".npz":
            arrays = read_arrays(path)
            arrays[name][0] = np.nan
            np.savez(path, **arrays)
            return
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata()
        arrays = safetensors.numpy.load_file(path)
        arrays[name] = np.full_like(arrays[name], np.nan)
        safetensors.numpy.save_file(arrays, path, metadata)

    return change


PAIRS = ("--source", "{lines}", "--target", "{lines}")
SCORE = ("score", "--run", "{run}", *PAIRS)
AVERAGE = ("average", "--run", "{run}", "--last", "2", "--output", "{folder}/output")
INSPECT = ("inspect", "--run", "{run}")
CONVERT = ("convert", "--from")
OWN = (*CONVERT, "flaxformer_mt", "{folder}/flaxformer_mt.safetensors", "{folder}/o.safetensors")
NATIVE = (*CONVERT, "marian-native", "{folder}/native", "{folder}/output")
MARIAN = (*CONVERT, "marian", "{folder}/marian", "{folder}/output")
JSON_LINES = ("translate", "--run", "{run}", "--input-format", "jsonl")
PREPARE = (
    "prepare", "--path", "{folder}/text", "--output", "{folder}/output",
    "--source-language", "en", "--target-language", "de",
)  # fmt: skip
TRAIN = ("train", f"--config={CONFIG}")
OWN_CONFIG = ("train", "--config={folder}/config.py")

LITERAL_CASES = {
    "a path that is too long": Literal(("translate", "--run", "a" * 300), "File name too long"),
    "two dashes as a path": Literal(("translate", "--run=--"), "run folder --"),
    "a line end in a name": Literal((*CONVERT, "marian", "a\nb", "{folder}/o.pt"), "a\\nb"),
    "a flipped bit in data.json": Literal(AVERAGE, "data.json", "run/data.json", bit(292, 4)),
    "an empty data.json": Literal(INSPECT, "data.json", "run/data.json", written(b"")),
    "an unknown entry of data.json": Literal(
        INSPECT, "data.json", "run/data.json", setting("unknown", 1)
    ),
    "another format of run folders": Literal(
        INSPECT, "the run has format 2", "run/data.json", setting("format", 2)
    ),
    "a size that is a string in a manifest": Literal(
        INSPECT, "files[...].bytes: expected an integer", "run/checkpoints/4/manifest.json",
        setting("files", {"progress.json": {"bytes": "1", "sha256": ""}}),
    ),
    "a history that is nested": Literal(
        INSPECT, "nested too deeply", "run/config.json",
        setting("history", json.loads("[" * 1000 + "]" * 1000)),
    ),
    "a history of another form": Literal(
        INSPECT, "history[0].step", "run/config.json",
        setting("history", [{"step": "1", "options": {}, "corpora": {}}]),
    ),
    "a configuration that is not UTF-8": Literal(
        AVERAGE, "config.json", "run/config.json", bit(1000, 7)
    ),
    "an unknown field of a configuration": Literal(
        AVERAGE, "config.json", "run/config.json", setting("unknown", 0)
    ),
    "another split to test on": Literal(
        INSPECT, "config.json", "run/config.json", edited('split": "test"', 'split": ""')
    ),
    "a pipe as manifest": Literal(SCORE, "checkpoints/4", "run/checkpoints/4/manifest.json", pipe),
    "another metric of the best checkpoint": Literal(
        SCORE, "checkpoints/4", "run/checkpoints/4/progress.json", edited('"loss": ', '"lossx": ')
    ),
    "a dictionary as configuration of the model": Literal(
        OWN_CONFIG, "config.py", "config.py",
        written(CONFIG.read_bytes().replace(b"presets.marian(", b"dict(")),
    ),
    "a configuration file that exits": Literal(
        OWN_CONFIG, "config.py, line 2", "config.py", written(b"import sys\nsys.exit(3)\n")
    ),
    "a mistake in a string that a configuration file executes": Literal(
        OWN_CONFIG, "config.py, line 2", "config.py",
        written(b"def get_config():\n    exec('(')\n"),
    ),
    "a pipe as text": Literal(
        ("score", "--run", "{run}", "--source", "{folder}/text/test.en", "--target", "{lines}"),
        "named pipe", "text/test.en", pipe,
    ),
    "half a character in JSON": Literal(
        JSON_LINES, "standard input, line 1", stdin=b'{"text": "\\ud800"}\n'
    ),
    "blank sentences to validate on": Literal(TRAIN, "valid", "text/valid.de", blank),
    "blank sentences to prepare": Literal(PREPARE, "train", "text/train.en", blank),
    "a parameter that is not finite": Literal(
        OWN, "output/bias", "flaxformer_mt.safetensors", not_a_number("output/bias")
    ),
    "a link to itself": Literal(OWN, "symbolic links", "flaxformer_mt.safetensors", loop),
    "a tensor that is not finite": Literal(
        NATIVE, "Wemb", "native/model.npz", not_a_number("Wemb")
    ),
    "a pipe as vocabulary": Literal(NATIVE, "named pipe", "native/vocab.spm", pipe),
    "a length penalty that is out of bounds": Literal(
        NATIVE, "model.npz", "native/config.yml", edited("normalize: 1.0", "normalize: -101")
    ),
    "an end token that is not in the vocabulary": Literal(
        MARIAN, "eos", "marian/config.json", setting("eos_token_id", 2**31)
    ),
    "more layers than tensors": Literal(
        MARIAN, "encoder_layers", "marian/config.json", setting("encoder_layers", 2)
    ),
}  # fmt: skip
