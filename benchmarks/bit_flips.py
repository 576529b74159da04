"""Flips one bit of a saved checkpoint at random places, and counts what each reader makes of it.

    python benchmarks/bit_flips.py [--flips 100]

Compared are Orbax's `StandardCheckpointer`, safetensors, `torch.load`, the reader of this package
for .pt files, and its run folders. Needs PyTorch. docs/reliability.md has the counts.
"""

import argparse
import logging
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
import torch

from flaxformer_mt.interop import checkpoint_files
from flaxformer_mt.runs.checkpoint import restore_params, write_params

TENSORS = {
    f"layer_{number}": np.random.default_rng(number).normal(size=(64, 64)).astype(np.float32)
    for number in range(8)
}


def write_orbax(path: Path) -> None:
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, TENSORS)
    checkpointer.wait_until_finished()


def read_orbax(path: Path) -> Mapping[str, Any]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)
        for name, tensor in TENSORS.items()
    }
    return ocp.StandardCheckpointer().restore(path, template)


def write_torch(path: Path) -> None:
    torch.save({name: torch.tensor(tensor) for name, tensor in TENSORS.items()}, path)


FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Mapping[str, Any]]]] = {
    "Orbax": (write_orbax, read_orbax),
    "safetensors": (
        lambda path: safetensors.numpy.save_file(TENSORS, path),
        safetensors.numpy.load_file,
    ),
    "torch.load": (write_torch, lambda path: torch.load(path, weights_only=True)),
    ".pt, read by flaxformer_mt": (write_torch, lambda path: checkpoint_files.read(path).tensors),
    "run folder": (
        lambda path: write_params(path, 1, TENSORS),
        lambda path: restore_params(path)[1],
    ),
}


def flip_a_bit(path: Path, random_state: random.Random) -> None:
    """Flips one bit of a file, or of a file in a folder; each byte is equally likely."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    (file,) = random_state.choices(files, [file.stat().st_size for file in files])
    content = bytearray(file.read_bytes())
    content[random_state.randrange(len(content))] ^= 1 << random_state.randrange(8)
    file.write_bytes(content)


def outcome(read: Callable[[Path], Mapping[str, Any]], path: Path) -> str:
    try:
        tensors = read(path)
    except Exception:  # Whatever the library raises.
        return "error"
    same = all(np.array_equal(np.asarray(tensors.get(name)), TENSORS[name]) for name in TENSORS)
    return "same values" if same else "other values"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100, help="bits flipped in each format")
    flips = parser.parse_args().flips
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name, (write, read) in FORMATS.items():
        random_state = random.Random(0)
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            whole, damaged = Path(folder, "whole.pt"), Path(folder, "damaged.pt")
            write(whole)
            for _ in range(flips):
                copy = shutil.copytree if whole.is_dir() else shutil.copy
                copy(whole, damaged)
                flip_a_bit(damaged, random_state)
                counts[outcome(read, damaged)] += 1
                (shutil.rmtree if damaged.is_dir() else Path.unlink)(damaged)
        print(f"{name:<28} {dict(counts)}")


if __name__ == "__main__":
    main()
