"""What the generators have found before, literally: each is refused in one line.

Each function returns a case, whose files are in `folder`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from fuzz.core import Case
from fuzz.world import World


def refused(message: str, *arguments: object, stdin: bytes = b"") -> Case:
    given = tuple(map(str, arguments))
    return Case(message, given, stdin, check=lambda _: "accepted", names=(message,))


def a_path_that_is_too_long(world: World, folder: Path) -> Case:
    return refused("File name too long", "translate", "--run", "a" * 300)


def two_dashes_as_a_path(world: World, folder: Path) -> Case:
    return refused("run folder --", "translate", "--run=--")


def a_line_end_in_a_name(world: World, folder: Path) -> Case:
    return refused("a\\nb", "convert", "--from", "marian", "a\nb", folder / "o.pt")


def half_a_character_in_json(world: World, folder: Path) -> Case:
    given = ("translate", "--run", world.run, "--input-format", "jsonl")
    return refused("standard input, line 1", *given, stdin=b'{"text": "\\ud800"}\n')


def a_parameter_that_is_not_finite(world: World, folder: Path) -> Case:
    intact, path = world.checkpoints["flaxformer_mt safetensors"], folder / "o.safetensors"
    with safetensors.safe_open(intact, framework="np") as file:
        metadata = file.metadata()
    arrays = safetensors.numpy.load_file(intact)
    arrays["output/bias"] = np.full_like(arrays["output/bias"], np.nan)
    safetensors.numpy.save_file(arrays, path, metadata)
    given = ("convert", "--from", "flaxformer_mt", path, folder / "output.safetensors")
    return refused("output/bias", *given)


def native(world: World, folder: Path, message: str) -> Case:
    shutil.copytree(world.native, folder / "model", dirs_exist_ok=True)
    given = ("convert", "--from", "marian-native", folder / "model", folder / "output")
    return refused(message, *given)


def a_tensor_that_is_not_finite(world: World, folder: Path) -> Case:
    case = native(world, folder, "Wemb")
    with np.load(folder / "model/model.npz") as archive:
        arrays = dict(archive)
    arrays["Wemb"][0] = np.nan
    np.savez(folder / "model/model.npz", **arrays)
    return case


def a_length_penalty_that_is_out_of_bounds(world: World, folder: Path) -> Case:
    case = native(world, folder, "model.npz")
    path = folder / "model/config.yml"
    path.write_text(path.read_text().replace("normalize: 1.0", "normalize: -101"))
    return case


def marian(world: World, folder: Path, message: str, **settings: Any) -> Case:
    shutil.copytree(world.marian, folder / "model")
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return refused(message, "convert", "--from", "marian", folder / "model", folder / "output")


def an_end_token_that_is_not_in_the_vocabulary(world: World, folder: Path) -> Case:
    return marian(world, folder, "eos", eos_token_id=2**31)


def more_layers_than_tensors(world: World, folder: Path) -> Case:
    return marian(world, folder, "encoder_layers", encoder_layers=2)


LITERAL_CASES = (
    half_a_character_in_json,
    a_parameter_that_is_not_finite,
    a_tensor_that_is_not_finite,
    a_length_penalty_that_is_out_of_bounds,
    an_end_token_that_is_not_in_the_vocabulary,
    more_layers_than_tensors,
)
WITHOUT_A_RUN = (a_path_that_is_too_long, two_dashes_as_a_path, a_line_end_in_a_name)
"""These need no model: they are in every test run."""
