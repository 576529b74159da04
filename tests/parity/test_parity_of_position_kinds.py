"""OpenNMT-py's positions and grouped queries: its reference, checkpoints, and cached steps.

Whole passes, every sub-layer and every gradient are compared in `test_compare.py`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy_references import GROUPED_QUERIES, VARIANTS

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity.references.common import join_heads, split_heads
from flaxformer_mt.parity.references.opennmt import AlibiPositionalBias, relative_buckets, rotated

ROTARY = {"max_relative_positions": -1}


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["opennmt_rotary", "opennmt_alibi", "opennmt_t5"])
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


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (ROTARY, {"position_kind": "rotary"}),
        (
            ROTARY | {"rotary_interleave": False},
            {"position_kind": "rotary", "position_layout": "concatenated"},
        ),
        ({"max_relative_positions": -2}, {"position_kind": "alibi"}),
        ({}, {"position_kind": "none"}),
    ],
)
def test_the_options_of_a_checkpoint_tell_what_its_tensors_do_not(options, fields, tmp_path):
    checkpoint = checkpoint_of("opennmt_rotary", options, tmp_path)
    config, _ = interop.load("opennmt", checkpoint)
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_options_of_a_checkpoint_tell_the_distance_of_its_buckets(tmp_path):
    config, _ = interop.load(
        "opennmt", checkpoint_of("opennmt_t5", {"max_relative_positions": 9}, tmp_path)
    )
    assert (config.position_kind, config.relative_position_sharing) == ("t5_relative", "layer")
    assert (config.relative_position_buckets, config.relative_position_max_distance) == (8, 9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "opennmt_rotary",
            ROTARY | {"rotary_theta": 500000},
            "position_base=10000.0, not 500000",
        ),
        ("opennmt_rotary", ROTARY | {"rotary_dim": 2}, "not rotary_dim=2"),
        ("opennmt_unbiased", ROTARY, "sinusoids and max_relative_positions=-1"),
    ],
)
def test_positions_that_our_model_does_not_have_are_refused(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        interop.load("opennmt", checkpoint_of(name, options, tmp_path))


def checkpoint_of(name, options, folder):
    """A checkpoint as OpenNMT-py writes it."""
    state = VARIANTS[name].build().state_dict()
    generator = {part: state.pop(f"generator.{part}") for part in ("weight", "bias")}
    content = {"model": state, "generator": generator}
    torch.save(content | {"opt": argparse.Namespace(heads=4, **options)}, folder / "step_9.pt")
    return folder / "step_9.pt"


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


def test_the_attention_of_the_reference_is_that_of_pytorch():
    attention = GROUPED_QUERIES.build("float64").encoder.transformer[0].self_attn
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    visible = torch.rand(2, 5, 5) < 0.5
    visible |= torch.eye(5, dtype=torch.bool)
    query, key, value = (
        split_heads(linear(x), heads)
        for linear, heads in (
            (attention.linear_query, 4),
            (attention.linear_keys, 2),
            (attention.linear_values, 2),
        )
    )
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None], enable_gqa=True
    )
    expected = attention.final_linear(join_heads(context))
    torch.testing.assert_close(attention(x, x, visible)[0], expected, rtol=0, atol=1e-14)


def test_the_published_family_is_refused_with_it():
    state = GROUPED_QUERIES.build().state_dict()
    with pytest.raises(UserError, match="num_kv_heads=0, not 2"):
        interop.load("opennmt", state, **GROUPED_QUERIES.hints)
