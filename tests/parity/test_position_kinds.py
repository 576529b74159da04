"""Rotary, ALiBi and T5 positions: cached decoding steps equal a whole pass of PyTorch.

Whole passes, every sub-layer and every gradient are compared in `test_compare.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from toy_references import VARIANTS

from flaxformer_mt import interop, parity
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity.references.opennmt import AlibiPositionalBias, relative_buckets, rotated

KINDS = [
    "opennmt_rotary",
    "opennmt_rotary_halves",
    "opennmt_alibi",
    "opennmt_t5",
    "opennmt_t5_shared",
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", KINDS)
def test_a_cached_step_equals_the_reference(name):
    variant = VARIANTS[name]
    reference = variant.build("float64")
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target_input, target_output = parity.example(config, rows=3, target_length=8)
    with torch.no_grad():
        expected = reference(torch.tensor(source).long(), torch.tensor(target_input).long()).numpy()
    model, variables = Transformer(config), {"params": interop.model_params(params)}
    encoded = model.apply(variables, source, method="encode")
    length = target_input.shape[1]
    cache = model.apply(variables, encoded, source, 1, length, method="init_cache")

    @jax.jit
    def step(tokens, cache, position):
        positions = jnp.full(len(source), position)
        return model.apply(variables, tokens[:, None], cache, positions, method="decode_step")

    for position in range(length):
        logits, cache = step(target_input[:, position], cache, position)
        real = target_output[:, position] != config.pad_id
        found = np.asarray(logits)[real, 0]
        np.testing.assert_allclose(found, expected[real, position], rtol=0, atol=1e-10)


def test_the_reference_rotates_by_the_equation():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    for interleave, pairs in ((True, [(0, 1), (2, 3)]), (False, [(0, 2), (1, 3)])):
        found = rotated(x, interleave, 10000.0)
        for position in range(3):
            for (a, b), frequency in zip(pairs, (1.0, 0.01), strict=True):
                angle = torch.tensor(position * frequency, dtype=torch.float64)
                first, second = x[0, 0, position, a], x[0, 0, position, b]
                expected = first * angle.cos() - second * angle.sin()
                torch.testing.assert_close(found[0, 0, position, a], expected)


def test_the_slopes_of_the_reference():
    assert AlibiPositionalBias.slopes_of(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert AlibiPositionalBias.slopes_of(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_the_buckets_of_the_reference():
    """Of 4 buckets per direction, two are for single distances; 4 is the root of 2 * 8."""
    forward = relative_buckets(10, True, 8, 8)[0].tolist()
    assert forward == [0, 5, 6, 6, 7, 7, 7, 7, 7, 7]
    assert relative_buckets(10, True, 8, 8)[:, 0].tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert relative_buckets(10, False, 4, 8)[:, 0].tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    assert relative_buckets(10, False, 4, 8)[0].tolist() == [0] * 10
