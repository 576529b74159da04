"""Fused attention against `einsum`: the loss, every gradient, and the time of both."""

import time
from collections.abc import Iterator
from typing import Any

from battery_parts.options import Options

BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2}
"""Limits of the differences, relative to the largest absolute value of the gradient."""


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Compares every backend that this device has, in both dtypes, on packed rows.

    Raises:
      RuntimeError: a backend differs from `einsum` by more than `BOUNDS`, or there is none.
    """
    from flaxformer_mt.config import TransformerConfig
    from flaxformer_mt.config.fields import choices_of, type_hints
    from flaxformer_mt.errors import UserError

    backends = [
        name
        for name in choices_of(type_hints(TransformerConfig).get("attention_backend"))
        # On CPUs "auto" is the einsum.
        if name != "einsum" and not (options.tiny and name == "auto")
    ]
    results: dict[str, Any] = {}
    for dtype in ("float32",) if options.tiny else BOUNDS:
        reference = gradient("einsum", dtype, options)
        results[dtype] = {"einsum": {"milliseconds": reference.pop("milliseconds")}}
        for backend in backends:
            try:
                found = gradient(backend, dtype, options)
            except UserError as error:
                results[dtype][backend] = {"not_here": str(error)}
                continue
            milliseconds = found.pop("milliseconds")
            results[dtype][backend] = {
                "milliseconds": milliseconds,
                "largest_difference": difference(found, reference),
            }
            yield results
    compared = [
        (dtype, backend, row["largest_difference"])
        for dtype, rows in results.items()
        for backend, row in rows.items()
        if "largest_difference" in row
    ]
    wrong = [row for row in compared if not row[2] <= BOUNDS[row[0]]]
    if wrong or not compared:
        raise RuntimeError(f"differences from einsum: {wrong or 'nothing was compared'}")


def gradient(backend: str, dtype: str, options: Options) -> dict[str, Any]:
    """Returns the gradients of all parameters by name, the loss, and the time of a pass."""
    import jax
    import numpy as np

    from flaxformer_mt.config import OptimizerConfig, TrainConfig, TransformerConfig
    from flaxformer_mt.data.stream.batches import BatchShape, make_batch
    from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
    from flaxformer_mt.model.transformer import Transformer
    from flaxformer_mt.training.devices import seed_key
    from flaxformer_mt.training.objective import make_objective
    from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
    from flaxformer_mt.training.state import create_state
    from flaxformer_mt.training.step import gradients

    width, rows, length, layers = (32, 2, 32, 1) if options.tiny else (512, 64, 256, 2)
    config = TransformerConfig(
        source_vocab_size=64,
        target_vocab_size=64,
        d_model=width,
        num_heads=max(2, width // 64),
        d_ff=2 * width,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        dropout_rate=0.0,
        norm_position="pre",
        final_norm=True,
        dtype=dtype,
        attention_backend=backend,
    )
    random = np.random.default_rng(0)
    sides = [
        Sentences.from_lists(
            [
                random.integers(4, 64, size).tolist()
                for size in random.integers(1, length // 4, 4 * rows)
            ]
        )
        for lengths in random.integers(1, length // 4, (2, 4 * rows))
    ]
    plan = [range(first, first + 4) for first in range(0, 4 * rows, 4)]
    batch = make_batch(TokenPairs(*sides), plan, BatchShape(rows, length, length), config)
    model, train = Transformer(config), TrainConfig()
    optimizer = make_optimizer(
        OptimizerConfig(), make_schedule(OptimizerConfig(), config.d_model, 1)
    )
    state = create_state(seed_key(train.seed), model, optimizer, train)
    objective = make_objective(model, train)
    compute = jax.jit(
        lambda state, batch: gradients(state, batch, objective=objective, config=train)
    )
    times = 1 if options.tiny else 20
    # Not TF32, whose rounding would hide a mistake.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        found, sums = jax.device_get(compute(state, batch))
        begin = time.perf_counter()
        jax.block_until_ready([compute(state, batch) for _ in range(times)])
        seconds = (time.perf_counter() - begin) / times
    names = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(found)}
    loss = sums.loss / sums.tokens
    return {"milliseconds": seconds * 1e3, "loss": np.float64(loss), **names}


def difference(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """Returns the largest difference, relative to the largest gradient, and that of the loss."""
    import numpy as np

    largest = max(float(np.max(np.abs(value))) for value in reference.values() if value.ndim)
    return max(
        float(np.max(np.abs(found[name] - value))) / (largest if value.ndim else abs(float(value)))
        for name, value in reference.items()
    )
