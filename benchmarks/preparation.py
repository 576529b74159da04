"""Measures the preparation of training text: pairs per second, and the search for duplicates.

    python benchmarks/preparation.py --text train.en train.de

Pairs per second are those of `flaxformer-mt prepare` with a vocabulary that is given, by the number
of its processes; the start of the program is measured with a text of 100 pairs, and subtracted.
Duplicates are searched for among random hashes, a fifth of which occur twice.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from flaxformer_mt.data.stream import store_parts
from flaxformer_mt.data.stream.store_parts import Parts, first_occurrences


def prepare(text: Path, vocabulary: Path | None, workers: int, workdir: Path) -> float:
    """Returns the seconds that the command takes."""
    command = [
        *(sys.executable, "-m", "flaxformer_mt", "prepare", "--config=multi30k_en_de"),
        *(f"--data.path={text}", f"--workdir={workdir}", f"--num-workers={workers}"),
        "--data.source-language=source",
        "--data.target-language=target",
        *([] if vocabulary is None else [f"--data.tokenizer-path={vocabulary}"]),
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def write_text(folder: Path, files: list[Path], pairs: int) -> Path:
    """Writes a folder of text with a number of different pairs."""
    folder.mkdir()
    for side, file in zip(("source", "target"), files, strict=True):
        lines = file.read_text(encoding="utf-8").splitlines()
        rounds = (f"{line} {number}\n" for number in itertools.count() for line in lines)
        text = "".join(itertools.islice(rounds, pairs))
        (folder / f"train.{side}").write_text(text, encoding="utf-8")
        for split in ("valid", "test"):
            (folder / f"{split}.{side}").write_text("".join(text.splitlines(True)[:100]))
    return folder


def seconds_for_duplicates(folder: Path, count: int) -> float:
    """Returns the seconds that a search among `count` hashes takes, with writing them left out."""
    random = np.random.default_rng(0)
    parts = Parts(folder, "origin")
    for number, start in enumerate(range(0, count, store_parts.ROWS)):
        size = min(store_parts.ROWS, count - start)
        hashes = random.integers(0, 2**64, size, np.uint64)
        hashes[: size // 5] = hashes[-(size // 5) :]
        path = folder / f"{number:06}"
        path.mkdir(parents=True)
        order = np.argsort(hashes).astype(np.int32)
        np.save(path / "hashes.npy", hashes[order])
        np.save(path / "order.npy", order)
    (folder / "end.json").write_text(json.dumps({"origin": "origin", "parts": number + 1}))
    begin = time.perf_counter()
    is_first, _ = first_occurrences(parts, np.empty(0, np.uint64))
    seconds = time.perf_counter() - begin
    assert abs(is_first.mean() - 0.8) < 0.01
    return seconds


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs=2, help="two files, line by line translations")
    parser.add_argument("--pairs", type=int, default=500_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hashes", type=int, nargs="*", default=[1_000_000, 5_000_000, 20_000_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.text:
            few = write_text(folder / "few", options.text, 100)
            many = write_text(folder / "many", options.text, options.pairs)
            prepare(many, None, 1, folder / "learned")
            numbers = itertools.count()
            times: dict[int, list[float]] = {workers: [] for workers in options.workers}
            for _, workers in itertools.product(range(options.repeats), options.workers):
                seconds = [
                    prepare(text, folder / "learned", workers, folder / f"run-{next(numbers)}")
                    for text in (many, few)
                ]
                times[workers].append(seconds[0] - seconds[1])
            for workers, found in times.items():
                rate = options.pairs / statistics.median(found)
                print(f"{workers} processes: {rate:,.0f} pairs/s")
        for count in options.hashes:
            seconds = seconds_for_duplicates(folder / f"{count}", count)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            print(f"{count:,} hashes: {seconds:.2f} s, at most {peak:,.0f} MB so far")


if __name__ == "__main__":
    main()
