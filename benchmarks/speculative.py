"""What speculative decoding can gain: the cost of cached steps of one token and of several.

    python benchmarks/speculative.py LARGE DRAFT [--proposals 4] [--rows 1 32] < sentences.txt

LARGE and DRAFT are runs with the same vocabulary. What is compared alternates, and the table has
medians of processor time, which other programs disturb least; with `taskset -c 0` it is the time on
one idle core. "Needed" is the number of tokens that a step must yield for a gain: the time of one
verification and of the steps of the draft, divided by that of a step of one token. "Yielded" is how
many it does: the steps of greedy search divided by those with proposals. The search is that of
examples/speculative_decoding.py.
"""

import argparse
import functools
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flaxformer_mt as fmt

EXAMPLE = Path(__file__).parents[1] / "examples/speculative_decoding.py"
STEPS, LENGTH, REPETITIONS = 20, 24, 9


def steps_of(model: fmt.Model, rows: int, tokens: int) -> Callable[[], Any]:
    """Returns a compiled loop of cached steps of `tokens` tokens in each row, in mid-sentence."""
    config = model.tokenizers.with_sizes(model.config.model)
    bound = fmt.Transformer(config).bind({"params": model.params})
    draw = np.random.default_rng(0)
    source = jnp.asarray(draw.integers(4, 100, (rows, LENGTH)), jnp.int32)
    cache = bound.init_cache(bound.encode(source), source, 1, 2 * LENGTH)
    given = jnp.asarray(draw.integers(4, 100, (rows, tokens)), jnp.int32)
    at = jnp.full(rows, LENGTH, jnp.int32)

    @jax.jit
    def loop(given: jax.Array, cache: Any) -> Any:
        def step(_: int, state: Any) -> Any:
            logits, cache = bound.decode_step(state[0], state[1], at)
            return logits.argmax(-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, STEPS, step, (given, cache))[0]

    return lambda: jax.block_until_ready(loop(given, cache))


def median_times(programs: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns the median processor time of each program in seconds; they alternate."""
    times: list[list[float]] = [[] for _ in programs]
    for repetition in range(REPETITIONS + 1):
        for program, own in zip(programs, times, strict=True):
            begin = time.process_time()
            program()
            if repetition:  # The first one compiles.
                own.append(time.process_time() - begin)
    return [*map(statistics.median, times)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("large")
    parser.add_argument("draft")
    parser.add_argument("--proposals", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    given = parser.parse_args()
    sys.argv[1:] = [given.large, given.draft]
    example = runpy.run_path(str(EXAMPLE))
    search, params, batch = (example[name] for name in ("search", "params", "batch"))
    large, draft, several = fmt.load(given.large), fmt.load(given.draft), given.proposals + 1
    print(
        f"| rows | large, 1 token | large, {several} tokens | draft, 1 token | needed | yielded | "
        f"translations per second | with {given.proposals} proposals |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rows in given.rows:
        steps = ((large, 1), (large, several), (draft, 1))
        one, verified, proposed = (
            1000 / STEPS * seconds
            for seconds in median_times([steps_of(model, rows, count) for model, count in steps])
        )
        sources = jnp.asarray(batch.encoder_input_tokens)
        parts = [sources[first : first + rows] for first in range(0, len(sources), rows)]

        def translate(proposals: int, parts: Sequence[jax.Array] = parts) -> int:
            return sum(int(search(params, part, proposals)[1]) for part in parts)

        plain, speculative = (functools.partial(translate, k) for k in (0, given.proposals))
        speeds = [len(sources) / seconds for seconds in median_times([plain, speculative])]
        needed = (verified + several * proposed) / one
        print(
            f"| {rows} | {one:.2f} ms | {verified:.2f} ms | {proposed:.2f} ms | {needed:.1f} | "
            f"{plain() / speculative():.1f} | {speeds[0]:.1f} | {speeds[1]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
