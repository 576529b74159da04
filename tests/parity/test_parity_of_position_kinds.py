"""Rotary, ALiBi and T5 positions: cached decoding steps equal a whole pass of PyTorch.

Whole passes, every sub-layer and every gradient are compared in `test_compare.py`.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seq2seq_tutorial
import torch
from toy_references import VARIANTS

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.adaptation import adapt
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity.references.opennmt import AlibiPositionalBias, relative_buckets, rotated
from flaxformer_mt.presets import FAMILIES, preset

ROTARY = {"max_relative_positions": -1}
KINDS = [
    "opennmt_rotary",
    "opennmt_rotary_halves",
    "opennmt_alibi",
    "opennmt_t5",
    "opennmt_t5_shared",
]


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", ["rotary", "alibi", "t5_relative"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("opennmt", "t5")])
def test_families_without_a_position_kind_refuse_to_be_written_with_it(family, kind, tmp_path):
    sizes = {"source_vocab_size": 11, "target_vocab_size": 11}
    config = dataclasses.replace(preset(family, **sizes), position_kind=kind)
    with pytest.raises(UserError, match=f"{family}.*position_kind.*{kind}"):
        interop.save(family, config, {}, tmp_path / "model.pt")


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "alibi", "t5_relative"])
def test_positions_of_self_attention_are_not_converted_to_tables(kind):
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 8, "num_heads": 2}
    layers = {"d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_length": 9}
    config = seq2seq_tutorial.FAMILY.configuration(**sizes, **layers)
    config = dataclasses.replace(config, position_kind=kind)
    tokens = np.full((1, 2), 5, np.int32)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens)["params"]
    with pytest.raises(UserError, match="position_kind"):
        adapt(interop.TrainingState(config, params, None), seq2seq_tutorial.FAMILY)


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
