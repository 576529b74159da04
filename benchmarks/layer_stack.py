"""Is a stack of layers better run as one compiled loop (nn.scan) or unrolled?

    python benchmarks/layer_stack.py [--json FILE]

Compiles a training step of the same model both ways, then times steps alternating between the two.
Prints a table and the median of the paired ratios.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from flaxformer_mt.config import OptimizerConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.training.devices import seed_key
from flaxformer_mt.training.objective import make_objective
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.state import create_state
from flaxformer_mt.training.step import train_step

SIZES = {
    "SMALL": TransformerConfig(
        d_model=128, num_heads=4, d_ff=256, num_encoder_layers=4, num_decoder_layers=4
    ),
    "MEDIUM": TransformerConfig(d_model=256, num_heads=4, d_ff=1024),
}
VOCAB, ROWS, LENGTH, SENTENCE = 8000, 32, 64, 16


def make_batch() -> Batch:
    """Random tokens, four sentences per row."""
    tokens = np.random.default_rng(0).integers(4, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    columns = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    segments, positions = columns // SENTENCE + 1, columns % SENTENCE
    weights = np.ones(tokens.shape, np.float32)
    return Batch(tokens, tokens, tokens, weights, segments, segments, positions, positions)


def measure(config: TransformerConfig, steps: int) -> dict[str, float]:
    """Seconds to compile and to step, for both forms, in one process."""
    batch = jax.device_put(make_batch())
    train_config = TrainConfig(batch_tokens=ROWS * LENGTH)
    measurements: dict[str, float] = {}
    runs = {}
    for form, scan_layers in (("scan", True), ("unrolled", False)):
        model = Transformer(
            dataclasses.replace(
                config,
                source_vocab_size=VOCAB,
                target_vocab_size=VOCAB,
                scan_layers=scan_layers,
            )
        )
        optimizer_config = OptimizerConfig()
        optimizer = make_optimizer(
            optimizer_config, make_schedule(optimizer_config, config.d_model, 1000)
        )
        key = seed_key(train_config.seed)
        state = create_state(key, model, optimizer, train_config)
        step = jax.jit(
            functools.partial(
                train_step,
                objective=make_objective(model, train_config),
                optimizer=optimizer,
                config=train_config,
            )
        )
        start = time.perf_counter()
        compiled = step.lower(state, batch, key).compile()
        measurements[f"{form}_compile_seconds"] = time.perf_counter() - start
        runs[form] = compiled, state

    seconds: dict[str, list[float]] = {form: [] for form in runs}
    for number in range(steps):
        for form, (compiled, state) in list(runs.items()):
            start = time.perf_counter()
            state, _ = compiled(state, batch, jax.random.fold_in(key, number))
            jax.block_until_ready(state)
            seconds[form].append(time.perf_counter() - start)
            runs[form] = compiled, state
            assert int(state.step) == number + 1
    for form, times in seconds.items():
        measurements[f"{form}_step_seconds"] = statistics.median(times[1:])
    ratios = [a / b for a, b in zip(seconds["scan"][1:], seconds["unrolled"][1:], strict=True)]
    measurements["step_ratio_scan_to_unrolled"] = statistics.median(ratios)
    return measurements


def main() -> None:
    """Measures all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    results = {}
    for name, config in SIZES.items():
        results[name] = measure(config, arguments.steps)
        print(name, "  ".join(f"{key}={value:.3f}" for key, value in results[name].items()))
    if arguments.json:
        results["jax"] = jax.__version__
        results["device"] = jax.devices()[0].device_kind
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
