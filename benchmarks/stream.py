"""Measures the training stream: tokens per second of one core that plans and reads batches.

    python benchmarks/stream.py [--pairs 4000000] [--case NAME ...] [--workers N ...] [--json FILE]
    python benchmarks/stream.py --starts 1 10 50 [--case packed bpe unigram]

A store of synthetic pairs is written to a temporary folder and memory-mapped, as in training. Each
case runs in a process of its own, on one core where the system can pin it, after a warm-up. Printed
are source and target tokens per second, padding left out; the fraction of positions that have a
token; the seconds from the opened store to the first batch; and the peak memory. With workers, the
process is not pinned, reads ahead, and its time and memory are without theirs.

Cases: packed, buckets and mixture (of two corpora) are a single process that reads whole batches;
of8 and of64 one of so many processes; bpe and unigram sample the subwords of the sources; cold
drops the store from the page cache first, where the system allows it. bound is NumPy that packs
pairs in the order of the store into rows that were planned before, by next-fit. grain, if it is
installed, shuffles pairs of the same arrays and packs them by its first-fit.

With --starts, a store of a million pairs, of which some are longer than a row, is repeated so many
times. Printed are, for a stream that begins and for one that continues at step 1,000,000, each in a
process of its own, the seconds from opening the store to the first batch, with the choice of the
row length; those of the processor; and the peak of the memory that is not mapped from files.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, MEAN = 64, 26
SECONDS = 8.0
CASES = (
    "bound", "packed", "of8", "of64", "buckets", "mixture", "bpe", "unigram", "cold", "grain",
)  # fmt: skip
SAMPLING = ("bpe", "unigram")


def write(folder: Path, pairs: int, with_texts: bool, longest: int = LENGTH) -> None:
    """Writes sides in the layout of a token store, and for sampling texts and a vocabulary."""
    random = np.random.default_rng(0)
    targets = np.clip(random.gamma(8, MEAN / 8, pairs).astype(np.int64), 2, longest)
    sources = np.clip(targets + random.normal(0, 3, pairs).astype(np.int64), 2, longest)
    for name, lengths in (("source", sources), ("target", targets)):
        np.concatenate([[0], np.cumsum(lengths)]).tofile(folder / f"{name}.offsets")
        random.integers(4, 10_000, lengths.sum(), np.uint16).tofile(folder / f"{name}.tokens")
    if with_texts:
        write_texts(folder, sources, random)


def write_texts(folder: Path, lengths: np.ndarray, random: np.random.Generator) -> None:
    """Writes sentences of words whose frequencies follow Zipf's law, and vocabularies of them."""
    from flaxformer_mt.config import DataConfig
    from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import train_sentencepiece

    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = [
        "".join(random.choice(syllables, size)) for size in random.integers(1, 5, 50_000).tolist()
    ]
    frequencies = 1 / np.arange(10, len(words) + 10)
    drawn = random.choice(words, int(lengths.sum()) // 2, p=frequencies / frequencies.sum())
    texts, first = [], 0
    for length in (lengths // 2).tolist():  # About two pieces per word.
        texts.append(" ".join(drawn[first : first + length]))
        first += length
    for kind in ("bpe", "unigram"):
        data = DataConfig(tokenizer=kind, vocab_size=8000)
        model = train_sentencepiece(texts[:50_000], data).model
        (folder / f"{kind}.model").write_bytes(model or b"")
    encoded = [text.encode() for text in texts]
    np.cumsum([0, *map(len, encoded)]).tofile(folder / "text.offsets")
    (folder / "text.values").write_bytes(b"".join(encoded))


def repeat(folder: Path, times: int) -> None:
    """Repeats the pairs of a store."""
    for path in folder.glob("*.offsets"):
        offsets = np.fromfile(path, np.int64)
        starts = np.arange(times)[:, np.newaxis] * offsets[-1]
        np.append((starts + offsets[:-1]).ravel(), times * offsets[-1]).tofile(path)
        (values,) = {*folder.glob(f"{path.stem}.*")}.difference([path])
        content = values.read_bytes()
        with values.open("ab") as file:
            for _ in range(times - 1):
                file.write(content)


def vocabulary(case: str, folder: Path) -> Any:
    """Returns the vocabulary that a case samples from, or None."""
    from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

    if case not in SAMPLING:
        return None
    kind = "unigram" if case == "unigram" else "bpe"
    return SentencePieceTokenizer((folder / f"{kind}.model").read_bytes())


def opened(folder: Path, with_texts: bool = False) -> Any:
    from flaxformer_mt.data.stream.encoded_corpus import CorpusReport, EncodedCorpus, SideReport
    from flaxformer_mt.data.stream.packing import Sentences

    def side(name: str, suffix: str, dtype: type) -> Sentences:
        tokens = np.memmap(folder / f"{name}.{suffix}", dtype, "r")
        return Sentences(
            np.asarray(tokens), np.asarray(np.memmap(folder / f"{name}.offsets", np.int64, "r"))
        )

    sides = side("source", "tokens", np.uint16), side("target", "tokens", np.uint16)
    reports = (SideReport(len(each.tokens), 0.0, 0, 0, 0) for each in sides)
    return EncodedCorpus(
        *sides,
        fields={"text": side("text", "values", np.uint8)} if with_texts else {},
        name="synthetic",
        report=CorpusReport(len(sides[1]), {}, *reports),
    )


def sub_corpus(corpus: Any, first: int, last: int) -> Any:
    from flaxformer_mt.data.stream.packing import Sentences

    sides = (
        Sentences(s.tokens, s.offsets[first : last + 1]) for s in (corpus.sources, corpus.targets)
    )
    sources, targets = sides
    return dataclasses.replace(corpus, sources=sources, targets=targets)


def our_stream(
    case: str, folder: Path, workers: int = 0, processes: int = 1, source_row_length: int = LENGTH
) -> Any:
    from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig
    from flaxformer_mt.data.stream.training_stream import TrainingStream

    data = DataConfig(
        source_row_length=source_row_length,
        target_row_length=LENGTH,
        batching="buckets" if case == "buckets" else "packed",
        bucket_lengths=(16, 32, 48, LENGTH),
        subword_sampling=0.1 if case in SAMPLING else 0,
        workers=workers,
    )
    # 256 rows for each process, 16,384 target positions.
    train = TrainConfig(batch_tokens=256 * LENGTH * processes)
    corpus = opened(folder, case in SAMPLING)
    corpora = [corpus]
    if case == "mixture":
        middle = len(corpus.targets) // 3
        corpora = [sub_corpus(corpus, 0, middle), sub_corpus(corpus, middle, len(corpus.targets))]
    sampler = vocabulary(case, folder)
    return TrainingStream(corpora, ExperimentConfig(data=data, train=train), sampler)


def our_batches(case: str, folder: Path, workers: int) -> Iterator[tuple[int, int]]:
    """Yields the numbers of tokens and of positions in the batches of one process."""
    from flaxformer_mt.data.stream.batches import Shard

    processes = {"of8": 8, "of64": 64}.get(case, 1)
    stream = our_stream(case, folder, workers, processes)
    shard = Shard(0, processes)
    if workers:
        with stream.prefetched(shard, lambda batch: batch, stream.start) as batches:
            for batch, _ in batches:
                yield counted(batch)
    position = stream.start
    while True:
        batch, position = stream.read(position, shard)
        yield counted(batch)


def bound_batches(folder: Path) -> Iterator[tuple[int, int]]:
    from flaxformer_mt.config import TransformerConfig
    from flaxformer_mt.data.stream.batches import BatchShape, packed_batch
    from flaxformer_mt.data.stream.packing import Sentences, TokenPairs

    corpus, model = opened(folder), TransformerConfig()
    sides = corpus.sources, corpus.targets
    plans = []
    first = 0
    for _ in range(200):
        ends, counts = first, []
        for _ in range(256):
            # A row ends before the first pair that exceeds it on a side.
            fitting = [s.offsets[ends : ends + LENGTH] - s.offsets[ends] <= LENGTH for s in sides]
            counts.append(int(np.logical_and(*fitting).sum()) - 1)
            ends += counts[-1]
        plans.append((first, ends, np.array(counts)))
        first = ends
    for first, last, counts in itertools.cycle(plans):
        pairs = TokenPairs(*(Sentences.join_spans([(side, first, last)]) for side in sides))
        yield counted(packed_batch(pairs, counts, BatchShape(256, LENGTH, LENGTH), model))


def counted(batch: Any) -> tuple[int, int]:
    sides = batch.encoder_segment_ids, batch.decoder_segment_ids
    return sum(int(np.count_nonzero(s)) for s in sides), sum(s.size for s in sides)


def grain_batches(folder: Path) -> Iterator[tuple[int, int]]:
    import grain
    from grain import experimental

    corpus = opened(folder)

    class Source:
        def __len__(self) -> int:
            return len(corpus.targets)

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"source": corpus.sources[index], "target": corpus.targets[index]}

    pairs = grain.MapDataset.source(Source()).shuffle(seed=0).repeat().to_iter_dataset(
        grain.ReadOptions(num_threads=0)
    )  # fmt: skip
    lengths = {"source": LENGTH, "target": LENGTH}
    rows = experimental.FirstFitPackIterDataset(pairs, length_struct=lengths, num_packing_bins=64)
    for batch in rows.batch(256):
        sides = batch["source_segment_ids"], batch["target_segment_ids"]
        yield sum(int(np.count_nonzero(s)) for s in sides), sum(s.size for s in sides)


def drop_pages(folder: Path) -> None:
    """Asks the system to forget the pages of the store."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: str, folder: Path, workers: int) -> dict[str, float]:
    if hasattr(os, "sched_setaffinity") and not workers:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import flaxformer_mt.data.stream.training_stream  # noqa: F401  (not part of the time)

    special: dict[str, Callable[[Path], Iterator[tuple[int, int]]]]
    special = {"bound": bound_batches, "grain": grain_batches}
    start = time.perf_counter()
    batches = special[case](folder) if case in special else our_batches(case, folder, workers)
    next(batches)
    seconds_to_first = time.perf_counter() - start
    if case != "cold":
        for _ in range(20):
            next(batches)
    tokens = positions = 0
    start, processor = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < SECONDS:
        own, all_positions = next(batches)
        tokens += own
        positions += all_positions
    seconds = time.perf_counter() - start
    return {
        "million_tokens_per_second": tokens / seconds / 1e6,
        "million_tokens_per_processor_second": tokens / (time.process_time() - processor) / 1e6,
        "fill": tokens / positions,
        "seconds_to_first_batch": seconds_to_first,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure_start(case: str, folder: Path, step: int) -> dict[str, float]:
    import flaxformer_mt.data.stream.training_stream  # noqa: F401  (not part of the time)
    from flaxformer_mt.data.stream.batches import DataPosition

    before, peak, finished = own_memory(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.005):
            peak = max(peak, own_memory())

    threading.Thread(target=watch).start()
    start, processor = time.perf_counter(), time.process_time()
    stream = our_stream(case, folder, source_row_length=0)
    position = stream.start
    if step:
        # In the middle of a later epoch.
        epoch, streams = step * 600 // stream.pairs, stream._mixture.streams
        place = epoch, stream._mixture.blocks(epoch) // 2, 7
        position = DataPosition(epoch, step=step, streams=(place,) * streams)
    stream.read(position)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    finished.set()
    memory = (peak - before) / 2**20
    return {"seconds": seconds, "processor_seconds": processor, "memory_mib": memory}


def own_memory() -> int:
    """Returns the bytes of this process in memory that are not mapped from files (on Linux)."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a process of its own: peak memory is inherited by forks."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def report(name: str, values: dict[str, float]) -> dict[str, float]:
    print(f"{name:24}" + "  ".join(f"{k}={v:,.3g}" for k, v in values.items()), flush=True)
    return values


def starts(cases: Sequence[str], millions: Sequence[int]) -> dict[str, Any]:
    results = {}
    for case, times in itertools.product(cases, millions):
        with tempfile.TemporaryDirectory() as name:
            apart(write, Path(name), 10**6, case in SAMPLING, 2 * LENGTH)
            repeat(Path(name), times)
            for step in (0, 10**6):
                key = f"{case}, {times}M, step {step}"
                results[key] = report(key, apart(measure_start, case, Path(name), step))
    return results


def rates(cases: Sequence[str], pairs: int, all_workers: Sequence[int]) -> dict[str, Any]:
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {False: Path(name, "tokens"), True: Path(name, "texts")}
        for with_texts, folder in folders.items():
            if (with_texts and {*SAMPLING} & {*cases}) or not with_texts:
                folder.mkdir()
                apart(write, folder, min(pairs, 10**6) if with_texts else pairs, with_texts)
        for case, workers in itertools.product(cases, all_workers):
            name = f"{case}, {workers} workers"
            folder = folders[case in SAMPLING]
            if case == "cold":
                drop_pages(folder)
            try:
                results[name] = report(name, apart(measure, case, folder, workers))
            except ImportError as error:
                print(f"{name:24}{error}", file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=4_000_000)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--workers", type=int, nargs="+", default=[0], help="data.workers")
    parser.add_argument("--starts", type=int, nargs="+", metavar="MILLIONS")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    cases = arguments.case
    results = (
        starts(cases, arguments.starts)
        if arguments.starts
        else rates(cases, arguments.pairs, arguments.workers)
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
