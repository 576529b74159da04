"""Measures packing of pairs into rows: speed, fill of the rows, and peak memory.

    python benchmarks/planning.py --text NAME=SOURCE,TARGET [--text ...] [--json FILE]

Each `--text` names two text files, plain or gzipped, with one sentence per line; a joint vocabulary
of 10,000 pieces is learned from them. The source row length is chosen as in training. Then 10
million synthetic pairs, memory-mapped in a temporary folder, are read as batches for one epoch in a
separate process, whose peak memory is reported. Prints a table. Packing is timed in seconds of
processor time, the best of five.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.text_files import stream_parallel
from flaxformer_mt.data.stream.encoded_corpus import (
    CorpusReport,
    EncodedCorpus,
    SideReport,
    encode_corpus,
)
from flaxformer_mt.data.stream.packing import Sentences, plan_rows
from flaxformer_mt.data.stream.training_stream import TrainingStream
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

ROUNDS = 5
CHUNK = 1_000_000  # Synthetic pairs written at once.


def read_text(name: str, source: str, target: str, config: ExperimentConfig) -> EncodedCorpus:
    sides = zip(*stream_parallel(Path(source), Path(target)), strict=True)
    corpus = ParallelCorpus(*map(list, sides), name)
    return encode_corpus(corpus, Tokenizers.train([corpus], config.data), config.model)


def measure_text(corpus: EncodedCorpus, config: ExperimentConfig) -> dict[str, float]:
    """Measures the pairs packed per second and the fractions of positions used."""
    assert corpus.sources is not None
    row_lengths = TrainingStream([corpus], config).config.data.row_lengths
    sources, targets = corpus.sources.lengths, corpus.targets.lengths
    fits = (sources <= row_lengths[0]) & (targets <= row_lengths[1])
    sources, targets = sources[fits], targets[fits]
    seconds = []
    for number in range(ROUNDS):
        order = np.random.default_rng(number).permutation(len(targets))
        start = time.process_time()
        _, rows = plan_rows(sources, targets, *row_lengths, order)
        seconds.append(time.process_time() - start)
    return {
        "pairs": len(targets),
        "source_row_length": row_lengths[0],
        "target_row_length": row_lengths[1],
        "rows": len(rows),
        "source_fill": sources.sum() / (len(rows) * row_lengths[0]),
        "target_fill": targets.sum() / (len(rows) * row_lengths[1]),
        "pairs_per_second": len(targets) / min(seconds),
    }


def write_side(folder: Path, name: str, lengths: np.ndarray) -> None:
    """Writes random tokens of sentences with these lengths, in chunks."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    offsets.tofile(folder / f"{name}.offsets")
    random = np.random.default_rng(0)
    with (folder / f"{name}.tokens").open("wb") as file:
        for first in range(0, len(lengths), CHUNK):
            count = lengths[first : first + CHUNK].sum()
            random.integers(4, 10_000, count, np.int32).tofile(file)


def open_side(folder: Path, name: str) -> Sentences:
    return Sentences(
        np.memmap(folder / f"{name}.tokens", np.int32, "r"),
        np.memmap(folder / f"{name}.offsets", np.int64, "r"),
    )


def iterate(folder: Path, config: ExperimentConfig) -> dict[str, float]:
    """Reads one epoch of the pairs in a folder, in a fresh process."""
    sources, targets = open_side(folder, "source"), open_side(folder, "target")
    sides = (SideReport(len(side.tokens), 0.0, 0, 0, 0) for side in (sources, targets))
    report = CorpusReport(len(targets), {}, *sides)
    corpus = EncodedCorpus(sources, targets, name="synthetic", report=report)
    start = time.perf_counter()
    stream = TrainingStream([corpus], config)
    _, position = stream.read(stream.start)
    seconds_to_first_batch = time.perf_counter() - start
    batches = 1
    while position.epoch == 0:
        _, position = stream.read(position)
        batches += 1
    seconds = time.perf_counter() - start
    # Linux reports KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "pairs": stream.pairs,
        "source_row_length": stream.config.data.source_row_length,
        "batches": batches,
        "seconds_to_first_batch": seconds_to_first_batch,
        "pairs_read_per_second": stream.pairs / seconds,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30,
    }


def measure_synthetic(pairs: int, config: ExperimentConfig) -> dict[str, float]:
    """Writes synthetic pairs and reads them in a fresh process."""
    random = np.random.default_rng(0)
    targets = np.clip(random.gamma(8, 2, pairs).astype(np.int64), 3, 64)
    sources = np.clip((0.9 * targets + random.normal(0, 2, pairs)).astype(np.int64), 2, 64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_side(folder, "source", sources)
        write_side(folder, "target", targets)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(iterate, (folder, config))


def main() -> None:
    """Measures all corpora."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", action="append", default=[], metavar="NAME=SOURCE,TARGET")
    parser.add_argument("--synthetic-pairs", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    config = ExperimentConfig(data=DataConfig(vocab_size=10_000, target_row_length=64))
    results = {}
    for text in arguments.text:
        name, _, files = text.partition("=")
        corpus = read_text(name, *files.split(","), config)
        results[name] = measure_text(corpus, config)
    if arguments.synthetic_pairs:
        results["synthetic"] = measure_synthetic(arguments.synthetic_pairs, config)
    for name, values in results.items():
        print(name, "  ".join(f"{key}={value:,.4g}" for key, value in values.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2, default=float) + "\n")


if __name__ == "__main__":
    main()
