"""Continuous batching: the result for a sentence is the same as without other sentences."""

import dataclasses
import functools
import threading
import types

import jax
import numpy as np
import pytest

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.batching import continuous_batching, workers
from flaxformer_mt.decoding.batching.continuous_batching import ContinuousBatcher, Request
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer

MODEL = TransformerConfig(
    source_vocab_size=30,
    target_vocab_size=30,
    d_model=16,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=2,
)
ROUNDING = 1e-4
"""Relative rounding error of sums of up to 40 log-probabilities, with large logits."""

BEAM = DecodeConfig(beam_size=3, n_best=2, early_stopping="heuristic", batch_tokens=64)
"""Batches are small enough that rows are reused."""


@functools.cache
def params():
    source = np.ones((1, 4), np.int32)
    shapes = jax.eval_shape(Transformer(MODEL).init, jax.random.key(0), source, source)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 0.7).astype("f4"), shapes)


@functools.cache
def make_batcher(decode=BEAM):
    return ContinuousBatcher([(MODEL, params())], decode)


@functools.cache
def requests():
    rng = np.random.default_rng(0)
    # All fit into the same shape, of 16 source tokens.
    sources = [[*rng.integers(3, 30, size=1 + n % 14).tolist(), 2] for n in range(28)]
    return [
        Request(source, 0, 8 if number % 2 else 40, seed=number)
        for number, source in enumerate(sources)
    ]


@functools.cache
def together():
    return dict(make_batcher().decode(requests()))


def assert_same(found, expected):
    """Asserts equal translations, with scores equal up to rounding."""
    assert found.keys() == expected.keys()
    for index, one in found.items():
        assert one.tokens == expected[index].tokens
        np.testing.assert_allclose(one.scores, expected[index].scores, rtol=ROUNDING)


def test_results_do_not_depend_on_order_or_other_sentences():
    all_found = together()
    assert sorted(all_found) == list(range(28))
    # Rows are reused at different times, and some hypotheses outgrow the initial arrays.
    assert {len(found.tokens[0]) for found in all_found.values()} >= {8, 40}
    order = np.random.default_rng(2).permutation(28)
    for some in (order, order[:5]):
        found = dict(make_batcher().decode([requests()[index] for index in some]))
        assert_same(
            {int(some[number]): item for number, item in found.items()},
            {int(index): all_found[int(index)] for index in some},
        )


def test_parameters_that_are_not_finite_find_nothing():
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params())
    (found,) = (
        found for _, found in ContinuousBatcher([(MODEL, broken)], BEAM).decode(requests()[:1])
    )
    assert found.tokens == found.scores == found.log_probabilities == []


def test_a_consumer_that_stops_early_ends_all_threads():
    before = {*threading.enumerate()}
    results = make_batcher().decode(requests())
    next(results)
    results.close()
    assert {*threading.enumerate()} <= before


def test_errors_of_a_worker_are_raised_by_the_iterator():
    wrong = requests()[0]._replace(prefix=[5], allowed=np.array([99]))
    with pytest.raises(IndexError, match="99"):
        list(make_batcher().decode([wrong]))


@pytest.mark.slow
def test_several_devices_find_the_same():
    several = make_batcher(dataclasses.replace(BEAM, num_devices=3))
    used, all_are_used = set(), threading.Event()

    class Batch(continuous_batching._Batch):
        def __init__(self, batcher, device, *arguments):
            super().__init__(batcher, device, *arguments)
            assert {device} == set.union(
                *(leaf.devices() for leaf in jax.tree.leaves((self._params, self._state)))
            )
            used.add(device)
            if len(used) == 3:
                all_are_used.set()
            all_are_used.wait()  # None takes all requests before the others begin.

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "_Batch", Batch)
        assert_same(dict(several.decode(requests())), together())
    assert len(used) == 3


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(UserError, match=r"decode.num_devices=999, but this process has only 8 "):
        ContinuousBatcher([(MODEL, params())], dataclasses.replace(BEAM, num_devices=999))


def test_defaults_of_devices_and_batches_follow_the_platform(monkeypatch):
    cpus = jax.local_devices()
    assert workers.decoding_devices(DecodeConfig(), cpus[2]) == [cpus[2]]
    gpus = [types.SimpleNamespace(platform="gpu", id=number) for number in range(4)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    assert workers.decoding_devices(DecodeConfig(), gpus[1]) == [gpus[1], gpus[0], *gpus[2:]]
    assert workers.decoding_devices(DecodeConfig(num_devices=2), gpus[0]) == gpus[:2]
    assert workers.batch_tokens(DecodeConfig(), "cpu") == 1024
    assert workers.batch_tokens(DecodeConfig(), "tpu") == 16_384
    assert workers.batch_tokens(DecodeConfig(batch_tokens=7), "gpu") == 7
