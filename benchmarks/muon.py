"""Muon beside Adam: the validation loss of Multi30k, with the same script and the same batches.

    python benchmarks/muon.py MULTI30K [--steps 300] [--rates 0.0025 0.005 0.01] [--json FILE]

MULTI30K is a folder with train and valid, .en and .de. The model is that of
configs/multi30k_tiny_en_de.py. Each optimizer is trained with each peak of a one-cycle schedule.
Prints a Markdown table of the cross-entropy per target token of the whole validation text. The best
peak of each optimizer, by its last loss, is marked. FILE keeps the curves: those that it has are
not computed again.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array

import flaxformer_mt as fmt
from flaxformer_mt.config.files import load_config

ROWS, LENGTH = 32, 64
State: TypeAlias = dict[str, Any]
MakeOptimizer: TypeAlias = Callable[[optax.Schedule], optax.GradientTransformation]


def adam(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam with the constants of the configuration."""
    return optax.adam(schedule, b1=0.9, b2=0.98, eps=1e-8)


def muon(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the matrices of layers, as in docs/library.md, and the same Adam for the rest."""

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "matrix" if fmt.is_matrix(path, leaf) else "other", params
        )

    matrices = fmt.per_layer(optax.contrib.muon(schedule, consistent_rms=0.2))
    return optax.partition({"matrix": matrices, "other": adam(schedule)}, labels)


def curve(
    make: MakeOptimizer,
    peak: float,
    steps: int,
    config: fmt.TransformerConfig,
    data: fmt.TrainingStream,
    valid: list[fmt.Batch],
) -> dict[str, float]:
    """Trains a model; returns the validation loss by step."""
    mesh = fmt.make_mesh()
    optimizer = make(optax.cosine_onecycle_schedule(steps, peak, pct_start=0.3125))

    def create(key: Array) -> State:
        params = fmt.init(config, key)
        return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}

    def update(state: State, batch: fmt.Batch, key: Array, frozen: Any) -> tuple[State, None]:
        def loss(params: Any) -> Array:
            sums = fmt.cross_entropy(config, params, batch, key, smoothing=0.1, convention="others")
            return sums.loss / sums.weight

        gradient = jax.grad(loss)(state["params"])
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, None

    step = fmt.compile_step(update, mesh, seed=0)
    evaluate = fmt.compile_eval(
        lambda params, batch: fmt.cross_entropy(config, params, batch), mesh
    )
    state = fmt.create(create, mesh, seed=0)
    losses: dict[str, float] = {}
    for batch, position in data.batches(mesh):
        state, _ = step(state, batch)
        if position.step % (steps // 6) == 0:
            sums = [evaluate(state["params"], each) for each in valid]
            losses[str(position.step)] = float(
                sum(each.loss for each in sums) / sum(each.weight for each in sums)
            )
        if position.step == steps:
            return losses
    raise AssertionError("the stream of batches has no end")


def main() -> None:
    """Prints the table, and writes the curves as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("multi30k", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.5e-3, 5e-3, 1e-2])
    parser.add_argument("--optimizers", nargs="+", default=["adam", "muon"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    languages = {"source_language": "en", "target_language": "de"}
    pairs = fmt.read_pairs(given.multi30k, **languages)
    tokenizers = fmt.train_tokenizers(pairs, size=10_000)
    experiment = load_config(Path(__file__).parents[1] / "configs/multi30k_tiny_en_de.py")
    config = tokenizers.with_sizes(tokenizers.with_ids(experiment.model))
    data = fmt.packed(pairs, tokenizers, config, rows=ROWS, length=LENGTH)
    valid = fmt.evaluation_batches(
        fmt.read_pairs(given.multi30k, split="valid", **languages),
        tokenizers,
        config,
        fmt.make_mesh(),
        rows=ROWS,
        length=LENGTH,
    )
    is_there = given.json and given.json.exists()
    curves: dict[str, dict[str, float]] = json.loads(given.json.read_text()) if is_there else {}
    optimizers = {"adam": adam, "muon": muon}
    for name, peak in itertools.product(given.optimizers, given.rates):
        run = f"{name} | {peak:g}"
        if run not in curves:
            curves[run] = curve(optimizers[name], peak, given.steps, config, data, valid)
            if given.json:
                given.json.write_text(json.dumps(curves))
    steps = next(iter(curves.values()))
    print("| optimizer | peak rate |", " | ".join(f"step {step}" for step in steps), "|")
    print("|---|---|" + "---|" * len(steps))
    for name in given.optimizers:
        own = {run: [*losses.values()] for run, losses in curves.items() if run.startswith(name)}
        best = min(own, key=lambda run, own=own: own[run][-1])
        for run, losses in own.items():
            mark = "**" if run == best else ""
            print(f"| {run} |", " | ".join(f"{mark}{loss:.3f}{mark}" for loss in losses), "|")


if __name__ == "__main__":
    main()
