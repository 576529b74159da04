"""Checkpoint files: truncated, flipped, with wrong names, shapes, types, metadata and sizes."""

import random
from pathlib import Path

import numpy as np
import safetensors.numpy

from flaxformer_mt.interop.families import marian
from flaxformer_mt.runs.parameter_file import CARRIED
from fuzz.core import Case, Outcome, run_command
from fuzz.mutations import (
    damage_bytes,
    damage_entry,
    replace_file,
)
from fuzz.world import World

NAMES = (
    "", "x", "model.encoder.layers.999999999.fc1.weight", "model.encoder.layers.-1.fc1.weight",
    "model.encoder.layers.1e9.fc1.weight", "../../x", "a" * 5000, "\n", "adam/x", "carried/x",
    "model.decoder.layers.99999999999999999999.fc1.weight", "/", "a//b", "encoder/layers/9/x",
    "model.encoder.layers.1.fc1.weight", "ü", "__metadata__",
)  # fmt: skip
DTYPES = ("float16", "float64", "int32", "int64", "bool", "uint8", "complex64")
SHAPES = ((), (0,), (1,), (8, 0), (1, 8, 8), (9, 8), (8, 9), (150, 8))


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    name = rng.choice(sorted(world.checkpoints))
    family, suffix = name.split(" ")
    intact = world.checkpoints[name]
    path = folder / f"checkpoint.{suffix}"
    done, promise = rng.choice((raw, tensors))(rng, intact, path, folder)
    options = ("--from", family, "--to", "flaxformer_mt", *settings(family))
    return Case(
        f"{done} in {intact.name}",
        ("convert", *options, str(path), str(folder / "output.safetensors")),
        check=lambda outcome: difference(world, name, promise, folder, outcome),
        names=(str(path), "--set", "num_heads"),
    )


def settings(family: str) -> tuple[str, ...]:
    if family == "flaxformer_mt":
        return ()
    return ("--set", "num_heads=2")


def raw(rng: random.Random, intact: Path, path: Path, folder: Path) -> tuple[str, str]:
    """Damages the bytes of the file, or the file as a whole."""
    content = intact.read_bytes()
    path.write_bytes(content)
    if rng.random() < 0.2:
        done = damage_entry(rng, path, folder / "outside")
        return done, "same"
    damaged, done = damage_bytes(rng, content, b"{}" * 50)
    replace_file(path, damaged)
    # safetensors has no checksum: other numbers are other numbers.
    return done, "finite" if path.suffix == ".safetensors" else "same"


def tensors(rng: random.Random, intact: Path, path: Path, folder: Path) -> tuple[str, str]:
    """Changes a tensor: its name, shape, type or values."""
    arrays, metadata = load(intact)
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    promise = "refused"
    match rng.choice(("name", "name", "shape", "dtype", "all dtypes", "value", "delete", "extra")):
        case "name":
            new = rng.choice(NAMES)
            arrays[new] = arrays.pop(name)
            done = f"{name} is called {new[:60]!r}"
        case "shape":
            shape = rng.choice([each for each in SHAPES if each != array.shape])
            arrays[name] = np.zeros(shape, array.dtype)
            done = f"{name} has the shape {shape}"
        case "dtype":
            dtype = rng.choice(DTYPES)
            arrays[name] = array.astype(dtype)
            done = f"{name} is {dtype}"
        case "all dtypes":
            dtype = rng.choice(DTYPES)
            arrays = {key: value.astype(dtype) for key, value in arrays.items()}
            done = f"all are {dtype}"
            promise = "finite" if dtype.startswith("float") else "refused"
        case "value":
            value = rng.choice((np.nan, np.inf, -np.inf))
            arrays[name] = array.copy()
            arrays[name].reshape(-1)[rng.randrange(array.size)] = value
            done = f"{name} holds {value}"
        case "delete":
            del arrays[name]
            # A copy of a shared table may be missing; the bias of Marian is zero then.
            promise = "finite" if name == marian.BIAS else "same"
            done = f"{name} is missing"
        case _:
            new = rng.choice(NAMES[1:])
            arrays[new] = np.zeros(rng.choice(SHAPES), np.float32)
            done = f"{new[:60]!r} is added"
    save(path, arrays, metadata)
    return done, promise


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads the arrays and the metadata of an intact file."""
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, framework="np") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    import torch

    state = torch.load(path, weights_only=True)
    return {name: tensor.numpy() for name, tensor in state.items()}, {}


def save(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    if path.suffix == ".safetensors":
        safetensors.numpy.save_file(arrays, path, metadata or None)
        return
    import torch

    torch.save({name: torch.from_numpy(np.array(each)) for name, each in arrays.items()}, path)


def difference(world: World, name: str, promise: str, folder: Path, outcome: Outcome) -> str:
    """Says how a converted file is wrong.

    Args:
      world: has the intact file.
      name: its name there.
      promise: of the file that was converted: "same" if it holds the intact one's values or is
        damaged, "finite" if it may hold others, "refused" if it holds nothing usable.
      folder: where the output is.
      outcome: of the conversion.
    """
    if promise == "refused":
        return "accepted"
    found = parameters(folder / "output.safetensors")
    for key, array in found.items():
        if not np.isfinite(array).all():
            return f"accepted {key}, which is not finite"
    if promise == "same" and not equal(found, baseline(world, name)):
        return "other values without a word"
    return ""


def baseline(world: World, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays that an intact checkpoint is converted to."""
    if name not in world.results:
        family, suffix = name.split(" ")
        output = world.folder / f"converted-{family}-{suffix}.safetensors"
        options = ("--from", family, "--to", "flaxformer_mt", *settings(family))
        outcome = run_command(
            ("convert", *options, str(world.checkpoints[name]), str(output)), seconds=600
        )
        assert outcome.code == 0, outcome
        world.results[name] = parameters(output)
    return world.results[name]


def parameters(path: Path) -> dict[str, np.ndarray]:
    """Reads the parameters of a converted file: no copies of tables that another toolkit keeps."""
    arrays = safetensors.numpy.load_file(path)
    return {name: array for name, array in arrays.items() if not name.startswith(CARRIED)}


def equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() for name in ours
    )
