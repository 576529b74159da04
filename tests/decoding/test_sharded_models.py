"""Decoding with a model that one device could not hold."""

import jax
import numpy as np
import pytest
from talker import random_params, sentences

import flaxformer_mt as fmt
from flaxformer_mt import memory_limits
from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.decoding import attention_weights
from flaxformer_mt.decoding.batching import search_programs as programs
from flaxformer_mt.decoding.scoring import teacher_forcing
from flaxformer_mt.decoding.scoring.scorer import Scorer

SENTENCES = sentences(6, longest=3)
OPTIONS = {"max_length_factor": 1.0, "max_length_extra": 3}


@pytest.fixture
def wide(talker):
    config, _, tokenizers, _ = talker.parts
    config = fmt.TransformerConfig(
        d_model=64, num_heads=4, d_ff=512, num_encoder_layers=1, num_decoder_layers=2,
        **tokenizers.fields,
    )  # fmt: skip
    return config, random_params(config), tokenizers


@pytest.fixture
def largest(monkeypatch):
    """The most bytes that a program of a search needs on a device, by the compiler's analysis."""
    found = []
    for module, name in (
        (programs, "admit_rows"),
        (programs, "run_search"),
        (teacher_forcing, "target_log_probabilities"),
        (teacher_forcing, "most_probable_tokens"),
        (attention_weights, "_attention_weights"),
    ):
        program = getattr(module, name)

        def measured(*arguments, program=program, **options):
            memory = program.lower(*arguments, **options).compile().memory_analysis()
            found.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
            return program(*arguments, **options)

        monkeypatch.setattr(module, name, measured)
    return found


MESHES = {
    "fsdp": {"fsdp": 8},
    "data x fsdp x tensor": {"fsdp": 2, "tensor": 2},
}


@pytest.mark.slow_except("data x fsdp x tensor")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_larger_than_a_device_translates_with_the_same_tokens(
    monkeypatch, wide, largest, mesh
):
    config, params, tokenizers = wide
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    bound = int(0.7 * size)
    expected = fmt.translate(config, params, tokenizers, SENTENCES, beam_size=2, **OPTIONS)
    assert max(largest) > size
    largest.clear()
    monkeypatch.setattr(memory_limits, "device_memory", lambda devices: bound)
    given = fmt.place(params, fmt.make_mesh(**MESHES[mesh]))
    assert fmt.translate(config, given, tokenizers, SENTENCES, beam_size=2, **OPTIONS) == expected
    assert max(largest) < bound


@pytest.mark.slow
def test_passes_over_given_translations_leave_the_parameters_where_they_are(
    monkeypatch, wide, largest
):
    """Scores, alignments, maps of attention, and predictions."""
    config, params, tokenizers = wide
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    pairs = [(source, f"{source} a") for source in SENTENCES[:2]]

    def computed(params):
        scorer = Scorer(config, params, tokenizers, DecodeConfig(batch_tokens=16))
        scored = list(scorer.stream(pairs, alignment="words"))
        tokens = [list(each.tokens) for each in scored]
        predicted = teacher_forcing.predict_tokens(
            scorer.params, scorer.model, scorer.decode, tokens, tokens
        )
        translator = fmt.Translator(config, params, tokenizers)
        maps = attention_weights.sentence_attention(translator, *pairs[0]).maps["cross"]
        return [each.alignment for each in scored], predicted, (
            [each.log_probability for each in scored], maps.weights,
        )  # fmt: skip

    *tokens, numbers = computed(params)
    assert max(largest) > size
    largest.clear()
    bound = int(0.7 * size)
    monkeypatch.setattr(memory_limits, "device_memory", lambda devices: bound)
    *found, theirs = computed(fmt.place(params, fmt.make_mesh(fsdp=2, tensor=2)))
    assert found == tokens
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), theirs, numbers
    )
    assert max(largest) < bound


@pytest.mark.slow
def test_a_run_that_is_larger_than_a_device_is_loaded_on_the_host(
    monkeypatch, tmp_path, wide, largest
):
    config, params, tokenizers = wide
    fmt.save_run(tmp_path / "run", config, tokenizers, params)
    expected = fmt.load(tmp_path / "run").translate(SENTENCES, beam_size=1, **OPTIONS)
    bound = int(0.7 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
    largest.clear()
    monkeypatch.setattr(memory_limits, "device_memory", lambda devices: bound)
    model = fmt.load(tmp_path / "run")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(model.params))
    assert model.translate(SENTENCES, beam_size=1, **OPTIONS) == expected
    assert max(largest) < bound


def test_more_devices_than_there_are(wide):
    with pytest.raises(fmt.UserError, match=r"decode.devices_per_model=9 .* the 8 devices"):
        fmt.translate(*wide, SENTENCES, devices_per_model=9)
    with pytest.raises(fmt.UserError, match=r"decode.num_devices=6 do not fit .* a multiple"):
        fmt.Translator(*wide, DecodeConfig(devices_per_model=4, num_devices=6))
