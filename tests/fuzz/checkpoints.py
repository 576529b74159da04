"""Checkpoint files: truncated, flipped, with wrong names, shapes, types, metadata and sizes."""

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from flaxformer_mt.interop.families import marian
from flaxformer_mt.runs.parameter_file import CARRIED
from fuzz.core import Case, Outcome, run_command
from fuzz.mutations import (
    JSON_VALUES,
    damage_bytes,
    damage_entry,
    mutate_json,
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
SIZES = (0, 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, 10**9)
"""Of a header that says how long it is."""
FOREIGN_DTYPES = ("F8_E4M3", "F99", "BOOL", "I64", "F64", "BF16", "f32", "", "U8")


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    name = rng.choice(sorted(world.checkpoints))
    family, suffix = name.split(" ")
    intact = world.checkpoints[name]
    path = folder / f"checkpoint.{suffix}"
    ways: list[Callable[..., tuple[str, str]]] = [raw, raw, tensors, tensors, tensors]
    ways += [header, header, header] if suffix == "safetensors" else [pickled, members]
    done, promise = rng.choice(ways)(rng, intact, path, folder)
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


def header(rng: random.Random, intact: Path, path: Path, folder: Path) -> tuple[str, str]:
    """Changes the header of a safetensors file."""
    content = intact.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    values, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if rng.random() < 0.15:
        size = rng.choice(SIZES)
        path.write_bytes(struct.pack("<Q", size) + content[8:])
        return f"the header has {size} bytes", "same"
    metadata = values.get("__metadata__", {})
    if "config" in metadata and rng.random() < 0.6:
        metadata["config"], done, *_ = mutate_json(rng, json.loads(metadata["config"]))
        text, done = json.dumps(values), f"configuration: {done}"
    elif rng.random() < 0.3:
        entry = values[rng.choice(sorted(values.keys() - {"__metadata__"}))]
        key, new = rng.choice(
            (("dtype", rng.choice(FOREIGN_DTYPES)), ("shape", [2**40, 2**40]), ("shape", [-1]),
             ("data_offsets", [0, 2**63]), ("data_offsets", [8, 4]), ("shape", [2**62, 0]))
        )  # fmt: skip
        entry[key] = new
        text, done = json.dumps(values), f"{key}: {new}"
    else:
        text, done, *_ = mutate_json(rng, values)
    encoded = text.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return f"header: {done}", "finite"


def pickled(rng: random.Random, intact: Path, path: Path, folder: Path) -> tuple[str, str]:
    """Stores something in a PyTorch file that is no state dict."""
    import torch

    state = torch.load(intact, weights_only=True)
    name = rng.choice(sorted(state))
    tensor = state[name]
    things: dict[str, Any] = {
        "a list": [tensor],
        "a number": 3,
        "nothing": None,
        "an empty dictionary": {},
        "names that are numbers": dict(enumerate(state.values())),
        "a dictionary in itself": {"model": {"model": {"model": state}}},
        "a string as a tensor": state | {name: "x"},
        "an array as a tensor": state | {name: tensor.tolist()},
        "a tensor of no storage": state | {name: torch.zeros(8, device="meta")},
        "a sparse tensor": state | {name: tensor.to_sparse()},
        "an expanded tensor": state | {name: torch.zeros(()).expand(2**20, 2**20)},
        "an expanded row": state | {name: tensor[:1].expand(tensor.shape)},
        "a complex tensor": state | {name: tensor.to(torch.complex64)},
        "odd settings": {"model": state, "args": {"num_heads": rng.choice(JSON_VALUES)}},
        "other settings": {"model": state, "settings": rng.choice(JSON_VALUES)},
        "an odd optimizer": {"model": state, "optimizer": rng.choice(JSON_VALUES)},
        "an optimizer without state": {
            "model": state,
            "optimizer": {"state": {0: {"step": -1}}, "param_groups": [{"params": [0, 0]}]},
        },
    }
    done = rng.choice(sorted(things))
    torch.save(things[done], path, _use_new_zipfile_serialization=rng.random() < 0.9)
    return done, "finite"


class Bomb:
    """Is stored as a call: of a function that allocates, or that runs a command."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


BOMBS = (
    (bytearray, 10**10), (list, range(10**8)), (eval, "1/0"), (print, "x"), (bytes, 2**40),
    (str, "x"), (dict, ()), (complex, 1), (int, "9" * 5000),
)  # fmt: skip


def members(rng: random.Random, intact: Path, path: Path, folder: Path) -> tuple[str, str]:
    """Changes a member of a PyTorch file, which is a zip archive."""
    archive = zipfile.ZipFile(io.BytesIO(intact.read_bytes()))
    contents = {name: archive.read(name) for name in archive.namelist()}
    victim = rng.choice(sorted(contents))
    stored = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    match rng.choice(("bomb", "bomb", "garbage", "delete", "damage", "zip bomb")):
        case "bomb":
            victim = next(name for name in contents if name.endswith("data.pkl"))
            function, *arguments = rng.choice(BOMBS)
            contents[victim] = pickle.dumps({"x": Bomb(function, *arguments)}, protocol=2)
            done, promise = f"{function.__name__} is called", "refused"
        case "garbage":
            contents[victim] = rng.randbytes(rng.choice((0, 1, 100)))
            done, promise = f"{victim} is noise", "finite"
        case "delete":
            del contents[victim]
            done, promise = f"{victim} is missing", "same"
        case "zip bomb":
            contents[victim] = bytes(2**27)
            stored = zipfile.ZIP_DEFLATED
            done, promise = f"{victim} has 128 MB of zeros", "finite"
        case _:
            contents[victim], done = damage_bytes(rng, contents[victim], b"x")
            done, promise = f"{victim}: {done}", "finite"
    with zipfile.ZipFile(path, "w", stored) as written:
        for name, content in contents.items():
            written.writestr(name, content)
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
