"""Parity of all families with PyTorch, on the device.

In float32 with exact products (no TF32), by the tolerances of `flaxformer-mt parity`. In bfloat16,
which PyTorch rounds elsewhere, against our own float32: the device may be no further from it than
twice as far as the CPU, which rounds to the same type.
"""

import concurrent.futures
import json
import os
from collections.abc import Iterator
from typing import Any

from battery_parts.options import Options, finish, start

ALLOWED = 2.0
"""How many times as far from float32 as the CPU the device may be in bfloat16."""


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Compares every family, several of them at the same time.

    Raises:
      RuntimeError: some differ by more than rounding explains.
    """
    from flaxformer_mt.presets import FAMILIES

    if options.tiny:
        yield {"families": {"torch": family("torch", num_encoder_layers=1, num_decoder_layers=1)}}
        return
    variables = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }

    def of(name: str) -> dict[str, Any]:
        return json.loads(finish(start(options, "--family", name, **variables)))

    results: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for name, result in zip(FAMILIES, pool.map(of, FAMILIES), strict=True):
            results[name] = result
            yield {"families": results}
    differing = [name for name, result in results.items() if not result["passed"]]
    if differing:
        raise RuntimeError(f"{', '.join(differing)}: further from PyTorch than rounding explains")


def family(name: str, **settings: Any) -> dict[str, Any]:
    """Compares one family in this process, with these fields of the configuration."""
    from flaxformer_mt.parity.families.check import check_family

    report = check_family(name, dtype="float32", **settings)
    narrow = bfloat16(name)
    return {
        "passed": report.passed and narrow["device"] <= ALLOWED * narrow["cpu"],
        "float32": report.summary._asdict(),
        "float32_passed": report.passed,
        "bfloat16": narrow,
    }


def bfloat16(name: str) -> dict[str, float]:
    """Returns how far logits in bfloat16 are from those in float32, relative to their norm."""
    import dataclasses

    import jax
    import numpy as np

    from flaxformer_mt.model.transformer import Transformer
    from flaxformer_mt.presets import preset

    sizes = {"source_vocab_size": 64, "target_vocab_size": 64, "d_model": 32, "num_heads": 4}
    layers = {"d_ff": 64, "num_encoder_layers": 2, "num_decoder_layers": 2}
    wide = preset(name, **sizes, **layers)
    wide = dataclasses.replace(wide, dtype="float32", param_dtype="float32")
    random = np.random.default_rng(0)
    source, target = random.integers(4, 64, (2, 4, 12), dtype=np.int32)
    arguments = (source if wide.has_inputs else None, target)

    def logits(config: Any, device: Any, params: Any) -> np.ndarray:
        placed = jax.device_put((params, *arguments), device)

        def apply(params: Any, *tokens: Any) -> Any:
            return Transformer(config).apply({"params": params}, *tokens)

        return np.asarray(jax.jit(apply)(*placed), np.float64)

    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        params = jax.jit(Transformer(wide).init)(jax.random.key(0), *arguments)["params"]
    narrow = dataclasses.replace(wide, dtype="bfloat16")
    exact = logits(wide, cpu, params)

    def distance(device: Any) -> float:
        difference = logits(narrow, device, params) - exact
        return float(np.linalg.norm(difference) / np.linalg.norm(exact))

    on_cpu, device = distance(cpu), jax.devices()[0]
    return {"cpu": on_cpu, "device": on_cpu if device == cpu else distance(device)}
