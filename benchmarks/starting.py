"""Measures the start of a continued run on a large token store, with and without verification.

    python benchmarks/starting.py [--gigabytes 1]

Builds a store of generated phrases, repeats its arrays until the store has the size, and opens it:
with every file verified against its SHA-256, as a run does, and with only the sizes compared.
Prints the medians of five rounds, which alternate, with the store in the page cache.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.stream import token_store
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.run_layout import MANIFEST
from flaxformer_mt.runs.manifest import write_manifest

ROUNDS = 5


def enlarge(folder: Path, size: int) -> None:
    """Repeats the arrays of a store until its files have `size` bytes together."""
    times = size // sum(path.stat().st_size for path in folder.iterdir())
    for side in ("source", "target"):
        tokens = (folder / f"{side}.tokens").read_bytes()
        (folder / f"{side}.tokens").write_bytes(tokens * times)
        offsets = np.fromfile(folder / f"{side}.offsets", np.int64)
        starts = np.arange(times)[:, None] * offsets[-1]
        repeated = np.append((starts + offsets[:-1]).ravel(), times * offsets[-1])
        repeated.tofile(folder / f"{side}.offsets")
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def sizes_only(folder: Path, kind: str) -> None:
    """Compares nothing but sizes, in place of `damage`."""
    for path in folder.iterdir():
        path.stat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    gigabytes = parser.parse_args().gigabytes
    config = ExperimentConfig(data=DataConfig(corpus="phrases", generated_pairs=20_000))
    corpus = load_corpus(config.data, "train")
    tokenizers = Tokenizers.train([corpus], config.data)
    with tempfile.TemporaryDirectory() as cache:

        def seconds() -> float:
            start = time.perf_counter()
            token_store.open_stores(Path(cache), [corpus], tokenizers, config)
            return time.perf_counter() - start

        seconds()  # Builds it.
        enlarge(Path(cache, "train-0"), int(gigabytes * 1e9))
        verified, unverified = [], []
        for _ in range(ROUNDS):
            verified.append(seconds())
            with mock.patch.object(token_store, "damage", sizes_only):
                unverified.append(seconds())
    print(f"sizes compared   {statistics.median(unverified):.3f} s")
    print(f"SHA-256 verified {statistics.median(verified):.3f} s")


if __name__ == "__main__":
    main()
