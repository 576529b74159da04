"""Measurements of training: flops of the equations, MFU, memory."""

import importlib.util
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from flaxformer_mt.accelerators import ACCELERATORS
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import BatchShape, make_batch
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.objectives.flops import training_flops, work_of_batch, work_of_sentences
from flaxformer_mt.training.reporting.metrics import MEASUREMENTS, measurements
from flaxformer_mt.training.reporting.progress import Interval


def load_benchmark(name):
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def products_of(model, s, t):
    """The flops of one pair, product of matrices by product of matrices, written out."""
    d, h, k, u = model.d_model, model.num_heads, model.key_width, model.value_width
    steps = 0

    def matmul(rows, inner, columns, times=1):
        nonlocal steps
        steps += 2 * rows * inner * columns * times

    def attention(queries, keys, pairs):
        matmul(queries, d, h * k)
        matmul(keys, d, h * k)
        matmul(keys, d, h * u)
        matmul(pairs, k, 1, h)
        matmul(pairs, 1, u, h)
        matmul(queries, h * u, d)

    for _ in range(model.num_encoder_layers if model.has_inputs else 0):
        attention(s, s, s * s)
        matmul(s, d, model.d_ff, 2)
    for _ in range(model.num_decoder_layers):
        if model.decoder_kind == "ssru":
            matmul(t, d, d, 2)
        else:
            attention(t, t, sum(range(1, t + 1)))
        if model.has_inputs:
            attention(t, s, t * s)
        matmul(t, d, model.d_ff, 2)
    matmul(t, d, model.target_vocab_size)
    return 3 * steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 3, "value_dim": 5},
        {"decoder_kind": "ssru", "position_kind": "none"},
        {"has_inputs": False},
    ],
)
def test_flops_are_those_of_the_products(options):
    sizes = {"source_vocab_size": 50, "target_vocab_size": 50, "d_model": 8, "num_heads": 2}
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 2, "d_ff": 24}
    model = TransformerConfig(**sizes, **layers, **options)
    work = work_of_sentences(np.array([4, 7]), np.array([5, 3]))
    expected = products_of(model, 4, 5) + products_of(model, 7, 3)
    assert training_flops(model, work) == expected


@pytest.mark.slow
@pytest.mark.parametrize("has_inputs", [True, False])
def test_the_step_counts_the_sentences_of_a_batch(setup, has_inputs):
    tiny = setup.of(bigram=True, accumulation_steps=2, model={"has_inputs": has_inputs})
    batch = tiny.batch(0)
    targets = lengths(batch.decoder_segment_ids)
    sources = lengths(batch.encoder_segment_ids) if has_inputs else dict.fromkeys(targets, 0)
    work = work_of_sentences(*np.array([(sources[pair], targets[pair]) for pair in targets]).T)
    metrics = jax.device_get(tiny.train_step(tiny.state(), tiny.placed_batch(0))[1])
    flops, tokens = metrics["flops_per_target_token"]
    np.testing.assert_allclose(flops, training_flops(tiny.experiment.model, work), rtol=1e-6)
    assert tokens == work.targets


def lengths(segment_ids):
    rows, _ = np.nonzero(segment_ids)
    pairs, counts = np.unique([rows, segment_ids[segment_ids > 0]], axis=1, return_counts=True)
    return dict(zip(map(tuple, pairs.T), counts, strict=True))


H100 = types.SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA H100 80GB HBM3",
    process_index=0,
    memory_stats=lambda: {"bytes_in_use": 2 * 2**30, "peak_bytes_in_use": 3 * 2**30},
)


def test_mfu_is_that_of_the_benchmark():
    benchmark = load_benchmark("training")
    size, random = benchmark.SIZES["BASE"], np.random.default_rng(0)
    sides = [
        Sentences.from_lists([[5] * length for length in random.integers(2, 30, 40)])
        for _ in range(2)
    ]
    model = benchmark.model_config(size, "bfloat16")
    rows = [range(first, first + 4) for first in range(0, 40, 4)]
    batch = make_batch(TokenPairs(*sides), rows, BatchShape(10, 128, 128), model)
    work = jax.device_get(work_of_batch(batch))
    interval = Interval(seconds=0.25, seconds_waited=0.05)
    interval.add(
        {
            "loss": (3.0, work.targets),
            "target_tokens": (work.targets, 1.0),
            "flops_per_target_token": (training_flops(model, work), work.targets),
        }
    )
    found = measurements(interval, [H100, H100])
    assert found.keys() == set(MEASUREMENTS)
    per_token = benchmark.flops_per_target_token(size, *(side.lengths for side in sides))
    expected = work.targets / 0.25 * per_token / (2 * ACCELERATORS["h100"].flops)
    assert found["mfu"] == pytest.approx(expected, rel=1e-6)
    assert found["target_tokens_per_second"] == work.targets / 0.25
    assert found["target_tokens_per_second_per_device"] == work.targets / 0.5
    assert found["memory_bytes"] == 3 * 2**30
    assert found["data_wait_fraction"] == pytest.approx(0.2)


def test_what_is_not_known_is_left_out():
    unknown = types.SimpleNamespace(**{**vars(H100), "device_kind": "other"})
    unknown.memory_stats = lambda: None
    interval = Interval(
        {"target_tokens": (2.0, 1.0), "flops_per_target_token": (8.0, 2.0)}, seconds=1.0
    )
    assert measurements(interval, [unknown]).keys().isdisjoint({"mfu", "memory_bytes"})
    on_cpu = measurements(interval, jax.devices()[:1])
    assert "mfu" not in on_cpu
    assert 2**24 < on_cpu["memory_bytes"] < 2**40
