"""Folders of other programs, Hugging Face's and Marian's, damaged or contradicting themselves."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fuzz.core import Case, Outcome, run_command
from fuzz.mutations import damage_bytes, damage_entry, json_text, mutate_json, replace_file
from fuzz.world import World

SIZES = (
    "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim",
    "decoder_ffn_dim",
)  # fmt: skip
"""Settings that the tensors contradict if they are changed."""
MARIAN_SIZES = ("dim-emb", "dim-vocabs", "enc-depth", "dec-depth", "transformer-dim-ffn")
IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
BAD_IDS = (-1, 150, 2**31, 10**20, True, 1.5, "2", "x", [], {}, [0, "x"], [[2]], "@nan@", "@long@")
"""Ids that no vocabulary of 150 pieces has."""
BAD_SIZES = (0, -1, 10**9, 10**20, 2.5, True, "8", "x", [], {}, "@nan@", "@inf@", "@long@")
FILE_TYPES = (0x404, 0x408, 0x10001, 0x4101, 0, 2**40)
"""Types of tensors in Marian's binary format: float32, float64, quantized twice, unknown."""


def make(rng: random.Random, world: World, folder: Path) -> Case:
    """Returns a case, whose files are in `folder`."""
    maker = rng.choice((published, published, published, native, native, binary))
    return maker(rng, world, folder)


def convert(
    family: str,
    source: Path,
    folder: Path,
    done: str,
    check: Callable[[Outcome], str],
) -> Case:
    output = folder / "output"
    arguments = ("convert", "--from", family, str(source), str(output))
    return Case(done, arguments, check=check, names=(str(source), "--set"))


def published(rng: random.Random, world: World, folder: Path) -> Case:
    """A folder of Hugging Face's Marian."""
    source = Path(shutil.copytree(world.marian, folder / "model"))
    expected = "any"
    if rng.random() < 0.25:
        values = json.loads((source / "config.json").read_text())
        is_size = rng.random() < 0.5
        key = rng.choice(SIZES if is_size else IDS)
        values[key] = rng.choice(BAD_SIZES if is_size else BAD_IDS)
        write_json(source / "config.json", values)
        done, expected = f"{key} = {values[key]!r} in config.json", "refused"
    else:
        name = rng.choice(sorted(path.name for path in source.iterdir()))
        path = source / name
        if path.suffix == ".json" and rng.random() < 0.7:
            text, done, *_ = mutate_json(rng, json.loads(path.read_text()))
            replace_file(path, text.encode(errors="surrogatepass"))
        else:
            done = damage_file(rng, path, folder / "outside", world.marian)
        done = f"{done} in {name}"
    return convert("marian", source, folder, done, usable(world, folder, expected))


def native(rng: random.Random, world: World, folder: Path) -> Case:
    """A folder of Marian."""
    source = Path(shutil.copytree(world.native, folder / "model"))
    name = rng.choice(("config.yml", "model.npz", "model.npz", "vocab.spm", "options"))
    expected = "any"
    if name == "config.yml" and rng.random() < 0.7:
        text, done, *_ = mutate_json(rng, yaml.safe_load((source / name).read_text()))
        replace_file(source / name, text.encode(errors="surrogatepass"))
    elif name == "options":
        done, expected = other_options(rng, source / "model.npz")
    elif name == "model.npz" and rng.random() < 0.5:
        done, expected = other_tensors(rng, source / name)
    else:
        done = damage_file(rng, source / name, folder / "outside", world.native)
        # The zip archive has checksums.
        expected = "same" if name == "model.npz" else "any"
    check = usable(world, folder, expected)
    return convert("marian-native", source, folder, f"{done} in {name}", check)


def damage_file(rng: random.Random, path: Path, outside: Path, intact: Path) -> str:
    if rng.random() < 0.3:
        return damage_entry(rng, path, outside)
    other = rng.choice(sorted(intact.iterdir()))
    damaged, done = damage_bytes(rng, path.read_bytes(), other.read_bytes())
    replace_file(path, damaged)
    return f"replace by {other.name}" if "another" in done else done


def write_json(path: Path, values: Any) -> None:
    replace_file(path, json_text(values).encode(errors="surrogatepass"))


def options_of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return yaml.safe_load(arrays["special:model.yml"].tobytes().rstrip(b"\0").decode())


def other_options(rng: random.Random, path: Path) -> tuple[str, str]:
    """Changes the options that are stored with the tensors."""
    arrays = read_arrays(path)
    values = options_of(arrays)
    expected = "any"
    if rng.random() < 0.4:
        key = rng.choice([key for key in MARIAN_SIZES if key in values])
        new = rng.choice(BAD_SIZES)
        values[key] = [new, new] if isinstance(values[key], list) and rng.random() < 0.5 else new
        text, done, expected = json.dumps(values), f"{key} = {values[key]!r}", "refused"
    elif rng.random() < 0.2:
        text = done = rng.choice(("", "[", "a: &a [*a, *a]", "!!python/object:os.system x", "- 1"))
        expected = "refused"
    else:
        text, done, *_ = mutate_json(rng, values)
    arrays["special:model.yml"] = np.frombuffer(
        text.encode(errors="surrogatepass") + b"\0", np.int8
    )
    np.savez(path, **arrays)
    return f"options: {done}", expected


def other_tensors(rng: random.Random, path: Path) -> tuple[str, str]:
    """Changes a tensor."""
    arrays = read_arrays(path)
    name = rng.choice([name for name in sorted(arrays) if not name.startswith("special")])
    match rng.choice(("delete", "shape", "dtype", "value", "object", "name")):
        case "delete":
            del arrays[name]
            done = f"{name} is missing"
        case "shape":
            arrays[name] = np.zeros((*arrays[name].shape, 1), np.float32)
            done = f"{name} has another shape"
        case "dtype":
            dtype = rng.choice(("int32", "bool", "complex64", "U4", "M8[s]"))
            arrays[name] = np.ones(arrays[name].shape).astype("int64").astype(dtype)
            done = f"{name} is {dtype}"
        case "value":
            arrays[name] = np.full_like(arrays[name], rng.choice((np.nan, np.inf)))
            done = f"{name} is not finite"
        case "object":
            arrays[name] = np.array([None, {}], object)
            done = f"{name} holds objects"
        case _:
            new = rng.choice(("encoder_l999999999_ffn_W1", "x", "encoder_l0_ffn_W1", "a" * 300))
            arrays[new] = arrays.pop(name)
            done = f"{name} is called {new[:40]}"
    np.savez(path, **arrays)
    return done, "refused"


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file, np.load(file) as archive:
        return {name: archive[name] for name in archive.files}


def binary(rng: random.Random, world: World, folder: Path) -> Case:
    """Marian's binary format, beside its vocabulary."""
    source = Path(shutil.copytree(world.native, folder / "model"))
    arrays = read_arrays(source / "model.npz")
    (source / "model.npz").unlink()
    (source / "config.yml").unlink()
    content = marian_binary(rng, arrays)
    path = source / "model.bin"
    path.write_bytes(content)
    if rng.random() < 0.5:
        head = content[: rng.choice((8, 16, 48, 400))]
        damaged, done = damage_bytes(rng, head, b"\xff" * len(head))
        path.write_bytes(damaged + content[len(head) :])
        done = f"header: {done}"
    else:
        done = damage_file(rng, path, folder / "outside", world.native)
    return convert("marian-native", path, folder, f"{done} in model.bin", usable(world, folder))


def marian_binary(rng: random.Random, arrays: dict[str, np.ndarray]) -> bytes:
    """Returns tensors in Marian's binary format; seldom with a wrong header."""
    kinds = {name: 0x101 if name.startswith("special") else 0x404 for name in arrays}
    if rng.random() < 0.3:
        kinds[rng.choice(sorted(kinds))] = rng.choice(FILE_TYPES)
    shapes = {name: array.shape for name, array in arrays.items()}
    if rng.random() < 0.3:
        shapes[rng.choice(sorted(shapes))] = rng.choice(((2**30, 2**30), (-1, 8), (), (0,)))
    data = {name: array.tobytes() for name, array in arrays.items()}
    data = {name: each + bytes(-len(each) % 256) for name, each in data.items()}
    head = struct.pack("<2Q", 1, len(arrays))
    for name in arrays:
        sizes = len(name) + 1, kinds[name], len(shapes[name]), len(data[name])
        head += struct.pack("<4Q", *sizes)
    head += b"".join(name.encode() + b"\0" for name in arrays)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for shape in shapes.values())
    padding = -(len(head) + 8) % 256
    return head + struct.pack("<Q", padding) + bytes(padding) + b"".join(data.values())


def usable(world: World, folder: Path, expected: str = "any") -> Callable[[Outcome], str]:
    """Returns a check of the run that a folder is converted to: other commands can use it.

    Args:
      world: has the text to translate.
      folder: of the case; the run is its `output`.
      expected: "refused" if the folder makes no sense, "same" if a success has the intact values.
    """

    def check(outcome: Outcome) -> str:
        if expected == "refused":
            return "accepted"
        run = str(folder / "output")
        command = ("translate", "--run", run, "--input", str(world.lines), "--max-length", "3")
        translated = Case("translate the result", (*command, "--beam-size", "1"))
        outcome = run_command(translated.arguments, folder=folder)
        problem = translated.problem(outcome)
        if problem or outcome.code == 0:
            lines = outcome.out.count("\n")
            problem = problem or ("" if lines == 2 else f"{lines} lines for 2 sentences")
            return problem and f"{translated}: {problem}"
        if expected == "any" and "no translation fulfils" in outcome.err:
            return ""  # The numbers of files without checksums may be any.
        return f"the result is not usable: {outcome.err}"

    return check
