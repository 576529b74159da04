"""Training speed of base and big in bfloat16 beside a lean PyTorch, at the same tokens.

`benchmarks/training.py` has the competitors. The sentences are random tokens with the lengths of
text, so that no data is needed. The competitors of a size are compiled at the same time, and take
turns after that.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import training as benchmark

from battery_parts.options import Options

SIZES = {
    "base": benchmark.Size(6, 512, 2048, 8, steps=10, vocab=32000),
    "big": benchmark.Size(6, 1024, 4096, 16, steps=6, vocab=32000),
}
TINY = {"base": benchmark.Size(1, 32, 64, 2, steps=1, vocab=200)}


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Lets ours and PyTorch take turns at every size."""
    sizes = TINY if options.tiny else SIZES
    competitors = ["ours", "lean" if options.tiny else "compiled"]
    batch_tokens, row_length = (256, 64) if options.tiny else (16_384, 256)
    results = {}
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            benchmark.write_tokens(*sentences(size.vocab, 200 if options.tiny else 40_000), folder)
            benchmark.write_task(
                size,
                "float32" if options.tiny else "bfloat16",
                batch_tokens,
                row_length,
                folder,
                matrix_side=128 if options.tiny else 8192,
            )
            results[name] = benchmark.measure(
                size,
                competitors,
                rounds=1 if options.tiny else 8,
                warm_up=1 if options.tiny else 4,
                folder=folder,
                start_together=True,
            )
        yield results


def sentences(vocab: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns random pairs; their lengths are distributed as those of news, at most 100 tokens."""
    random = np.random.default_rng(0)
    sources = np.clip(random.lognormal(3.2, 0.5, count), 2, 100).astype(int)
    targets = np.clip(sources * random.normal(1.05, 0.15, count), 2, 100).astype(int)
    first = max(benchmark.PAD, benchmark.BOS, benchmark.EOS) + 1
    return tuple(
        [[*random.integers(first, vocab, length - 1).tolist(), benchmark.EOS] for length in lengths]
        for lengths in (sources, targets)
    )
