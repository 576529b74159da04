"""Decoding in bfloat16 beside `generate` of transformers: the same weights, the same sentences.

`benchmarks/decoding.py` has the competitors. The weights are random and hypotheses have a fixed
length, so that both compute the same number of tokens and no trained model is needed. At the end
ours is compared with itself in one command buffer.
"""

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decoding as benchmark
import numpy as np

from battery_parts.options import Options

COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
"""Launches the whole loop of a search at once: XLA by default launches each step."""


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Lets ours and `generate` take turns at beam sizes 1 and 4."""
    import jax

    from flaxformer_mt.model.transformer import Transformer
    from flaxformer_mt.presets import preset

    width, layers, vocab, count, length = (
        (16, 1, 60, 6, 6) if options.tiny else (512, 6, 32_000, 1024, 32)
    )
    model = preset(
        "marian",
        source_vocab_size=vocab,
        target_vocab_size=vocab,
        d_model=width,
        num_heads=max(2, width // 64),
        d_ff=4 * width,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        dtype="float32" if options.tiny else "bfloat16",
    )
    random = np.random.default_rng(0)
    first = max(model.pad_id, model.bos_id, model.eos_id) + 1
    first = 3 if first >= vocab else first
    sources = [
        [*random.integers(first, vocab - 1, size).tolist(), model.eos_id]
        for size in random.integers(4, 12 if options.tiny else 60, count)
    ]
    tokens = np.full((1, 4), first, np.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(
            jax.jit(Transformer(model).init)(jax.random.key(0), tokens, tokens)["params"]
        )
    task = {"model": model, "params": params, "sources": sources, "length": length}
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "task.pickle").write_bytes(pickle.dumps(task))
        benchmark.write_transformers(model, params, folder)
        for beam_size in (2,) if options.tiny else (1, 4):
            results[f"beam_{beam_size}"] = benchmark.measure(
                ["ours", "transformers"], beam_size, 1 if options.tiny else 3, folder
            )
            yield results
        if not options.tiny:
            results["beam_4_command_buffers"] = benchmark.measure(
                ["ours", f"whole_loop=ours XLA_FLAGS={COMMAND_BUFFERS}"], 4, 3, folder
            )
            yield results
