"""Runs that are initialized from trained parameters."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict

from flaxformer_mt.config import DataConfig, TrainConfig, to_dict, to_json
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoint import Checkpoints, write_params
from flaxformer_mt.training.warm_start import WarmStart, start_from, with_moments


def trained_elsewhere(tiny):
    """Parameters that no initialisation gives."""
    template = tiny.state_shapes.params
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), template)


def write_file(path, tiny, params, **metadata):
    """What `flaxformer-mt convert --to flaxformer_mt` writes of a checkpoint with an optimizer."""
    arrays = flatten_dict(params, sep="/")
    others = {
        **{f"adam/mean/{name}": np.zeros_like(array) for name, array in arrays.items()},
        "carried/encoder.version": np.zeros(1, np.float32),
    }
    config = json.dumps(to_dict(tiny.experiment.model))
    metadata = {"format": "flaxformer_mt", "config": config, **metadata}
    safetensors.numpy.save_file(arrays | others, path, metadata)


def load(path, tiny):
    return WarmStart(str(path)).parameters(tiny.experiment.model, tiny.state_shapes.params)


def refusal(path, tiny):
    """The message with which the file or folder is refused."""
    with pytest.raises(UserError) as caught:
        load(path, tiny)
    message = str(caught.value)
    assert message.startswith(f"train.init_from={path}: ")
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_a_converted_checkpoint_comes_without_what_the_model_has_not(setup, tmp_path):
    tiny = setup.of()
    params = trained_elsewhere(tiny)
    write_file(tmp_path / "converted.safetensors", tiny, params)
    loaded = load(tmp_path / "converted.safetensors", tiny)
    chex.assert_trees_all_equal(loaded, params)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_of_a_run_the_best_checkpoint_is_taken_and_its_average(setup, tmp_path, ema_decay):
    tiny = setup.of(bigram=True, ema_decay=ema_decay)
    params = trained_elsewhere(tiny)
    best = start_from(tiny.state(), params, tiny.devices.mesh).replace(step=jnp.int32(1))
    if best.ema is not None:
        best = best.replace(params=jax.tree.map(jnp.zeros_like, best.params))
    last = jax.tree.map(jnp.zeros_like, best)
    # Written before the vocabulary was known: 0 stands for its size.
    model = dataclasses.replace(tiny.experiment.model, source_vocab_size=0, target_vocab_size=0)
    stored = dataclasses.replace(tiny.experiment, model=model)
    (tmp_path / "config.json").write_text(to_json(stored), encoding="utf-8")
    with Checkpoints(tmp_path) as checkpointer:
        checkpointer.save(1, best, metrics={"loss": 1.0})
        checkpointer.save(2, last, metrics={"loss": 2.0})
    chex.assert_trees_all_equal(load(tmp_path, tiny), params)


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_training_goes_on_from_there_and_so_does_the_average(setup, strategy):
    tiny = setup.of(strategy, num_devices=2, bigram=True, ema_decay=0.5)
    params = trained_elsewhere(tiny)
    given = jax.tree.map(np.copy, params)
    fresh = tiny.state()
    state = start_from(fresh, params, tiny.devices.mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, fresh
    )
    chex.assert_trees_all_equal(jax.device_get((state.params, state.ema)), (given, given))

    state, _ = tiny.train_step(state, tiny.placed_batch(0))
    half_way = jax.tree.map(lambda old, new: (old + new) / 2, given, jax.device_get(state.params))
    chex.assert_trees_all_close(jax.device_get(state.ema), half_way, rtol=1e-5)
    chex.assert_trees_all_equal(params, given)


def test_another_model_is_refused_with_the_fields_that_differ(setup, tmp_path):
    path = tmp_path / "converted.safetensors"
    there = setup.of(model={"d_model": 16, "norm_position": "pre", "max_length": 99})
    write_file(path, there, trained_elsewhere(there))
    # Of all that differs, only these two decide what the parameters are.
    here = setup.of(model={"dropout_rate": 0.3, "head_dim": 8, "scan_layers": True})
    message = refusal(path, here)
    assert "(model.d_model: 16 there, 8 here; model.norm_position: pre there, post here)" in message


def test_another_vocabulary_is_refused_with_the_shapes_that_differ(setup, tmp_path):
    tiny = setup.of()
    params = trained_elsewhere(tiny)
    params["target_embedding"]["embedding"] = np.zeros((9, 8), np.float32)
    del params["decoder"]
    write_file(tmp_path / "converted.safetensors", tiny, params)
    message = refusal(tmp_path / "converted.safetensors", tiny)
    assert "target_embedding/embedding: [9, 8] there, [20, 8] here" in message
    assert "decoder/layers/feed_forward/output/bias: nothing there, [1, 8] here" in message


def test_what_is_no_parameters_is_refused(setup, tmp_path):
    tiny = setup.of(bigram=True)
    assert "there is no such file" in refusal(tmp_path / "missing", tiny)
    assert "not a run folder" in refusal(tmp_path, tiny)
    (tmp_path / "text").write_text("not weights")
    assert "not a safetensors file" in refusal(tmp_path / "text", tiny)
    write_file(tmp_path / "foreign", tiny, trained_elsewhere(tiny), format="pt")
    assert "no configuration" in refusal(tmp_path / "foreign", tiny)
    write_file(tmp_path / "damaged", tiny, trained_elsewhere(tiny), config="{")
    assert "metadata is damaged" in refusal(tmp_path / "damaged", tiny)


def test_the_vocabulary_comes_from_where_the_parameters_come_from(tmp_path):
    assert WarmStart(str(tmp_path)).tokenizer_path() == str(tmp_path)
    with pytest.raises(UserError, match=r"data\.tokenizer_path"):
        WarmStart("converted.safetensors").tokenizer_path()


def test_parameters_of_another_vocabulary_are_refused(trained_run, tmp_path):
    tokenizers = read_tokenizers(trained_run)
    WarmStart(str(trained_run)).check_vocabulary(tokenizers)
    WarmStart(str(tmp_path / "parameters.safetensors")).check_vocabulary(tokenizers)
    size = tokenizers.source.vocab_size
    corpus = load_corpus(DataConfig(corpus="phrases", generated_pairs=300), "train")
    other = Tokenizers.train([corpus], DataConfig(vocab_size=size))
    assert other.source.vocab_size == size
    with pytest.raises(UserError, match=r"init_from=.* has another source vocabulary than"):
        WarmStart(str(trained_run)).check_vocabulary(other)


def write_run(folder, tiny, state):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(tiny.experiment), encoding="utf-8")
    with Checkpoints(folder) as checkpointer:
        checkpointer.save(int(state.step), state, metrics={"loss": 1.0})
    return str(folder)


def after_steps(tiny, count, state=None):
    state = tiny.created_state() if state is None else state
    for step in range(count):
        state, _ = tiny.train_step(state, tiny.placed_batch(int(state.step) + step))
    return state


@pytest.mark.slow_except("mesh-2")
@pytest.mark.parametrize(("strategy", "num_devices"), [("mesh", 1), ("mesh", 2), ("pmap", 2)])
def test_with_its_moments_a_run_goes_on_as_if_it_had_not_ended(
    setup, tmp_path, strategy, num_devices
):
    constant = {"schedule": "constant"}
    tiny = setup.of(strategy, num_devices=num_devices, bigram=True, optimizer=constant)
    trained = after_steps(tiny, 2)
    folder = write_run(tmp_path / "run", tiny, trained)
    trained_moments = jax.device_get(trained.opt_state)
    fresh = tiny.created_state()
    state = start_from(fresh, load(folder, tiny), tiny.devices.mesh)
    opt_state, differing = with_moments(state.opt_state, WarmStart(folder).moments())
    assert not differing
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, each) for each in (opt_state, fresh))
    assert next(shardings) == next(shardings).opt_state
    # Of what is restored, only the steps of the learning rate are not.
    adam, schedule = jax.device_get(opt_state)
    chex.assert_trees_all_equal(adam, trained_moments[0])
    assert (adam.count, schedule.count) == (2, 0)
    batch = tiny.placed_batch(5)
    further, _ = tiny.train_step(trained, batch)
    again, _ = tiny.train_step(dataclasses.replace(state, opt_state=opt_state), batch)
    chex.assert_trees_all_equal(*jax.device_get((further.params, again.params)))


def test_moments_are_asked_of_runs_that_have_them(setup, tmp_path):
    with pytest.raises(UserError, match=r"train\.init_optimizer=True needs train\.init_from"):
        TrainConfig(init_optimizer=True)
    tiny = setup.of(bigram=True)
    write_file(tmp_path / "converted.safetensors", tiny, trained_elsewhere(tiny))
    with pytest.raises(UserError, match=r"init_optimizer, of .*safetensors.* holds no checkpoint"):
        WarmStart(str(tmp_path / "converted.safetensors")).moments()
    write_params(tmp_path / "averaged", 1, trained_elsewhere(tiny))
    with pytest.raises(UserError, match=r"init_optimizer, of .* has no state of an optimizer"):
        WarmStart(str(tmp_path / "averaged")).moments()
