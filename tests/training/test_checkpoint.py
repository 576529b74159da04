"""Checkpoints: exact, kept by the right rule, readable from any machine, clear when missing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxformer_mt.errors import UserError
from flaxformer_mt.training.checkpoint import Checkpointer, restore_params
from flaxformer_mt.training.state import TrainState


def make_state(step=0, num_devices=1, size=8):
    """A state whose values depend on the step, placed on some devices."""
    mesh = jax.make_mesh(
        (num_devices,),
        ("data",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:num_devices],
    )
    params = {"layers": {"kernel": jax.random.normal(jax.random.key(step), (size, size))}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(step)),
    )
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.is_dir())


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 1), (8, 1), (1, 8)])
def test_what_is_saved_is_restored_to_the_bit_on_other_devices(tmp_path, saved_on, restored_on):
    state = make_state(step=7, num_devices=saved_on)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(7, state)
    template = make_state(step=0, num_devices=restored_on)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 7
        restored = checkpointer.restore(template)
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    chex.assert_trees_all_equal_dtypes(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding == like.sharding


def test_parameters_alone_come_to_one_device(tmp_path):
    state = make_state(step=3, num_devices=8)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
    step, params = restore_params(tmp_path)
    assert step == 3
    chex.assert_trees_all_equal(params, jax.device_get(state.params))
    chex.assert_trees_all_equal_dtypes(params, state.params)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(params))


def test_the_memory_of_a_saved_state_may_be_used_again(tmp_path):
    """The next step writes over a donated state while the checkpoint is still being written."""
    state = make_state(step=1, size=1500)
    expected = np.array(state.params["layers"]["kernel"])
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        jax.block_until_ready(overwrite(state))
    np.testing.assert_array_equal(restore_params(tmp_path)[1]["layers"]["kernel"], expected)


@pytest.mark.parametrize(
    ("metric", "figures", "best"),
    [
        ("loss", {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0}, 2),
        ("bleu", {1: 30.0, 2: 10.0, 3: 20.0, 4: 5.0}, 1),
        # Without a validation, or without the figure, a checkpoint is never the best.
        ("loss", {1: None, 2: 1.0, 3: None, 4: 5.0}, 2),
        ("bleu", {1: 3.0, 2: None, 3: None, 4: None}, 1),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, metric, figures, best):
    with Checkpointer(tmp_path, keep_last=1, keep_best=1, best_metric=metric) as checkpointer:
        for step, value in figures.items():
            others = {"accuracy": 0.5, "bleu_signature": "text"}
            checkpointer.save(
                step, make_state(step), None if value is None else {metric: value, **others}
            )
            checkpointer.wait()
    assert steps_in(tmp_path) == sorted({best, 4})
    assert restore_params(tmp_path, "best")[0] == best
    assert restore_params(tmp_path, "last")[0] == 4
    step, params = restore_params(tmp_path, best)
    assert step == best
    chex.assert_trees_all_equal(params, make_state(best).params)


def test_no_best_is_kept_when_none_is_wanted(tmp_path):
    with Checkpointer(tmp_path, keep_last=2, keep_best=0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step), {"loss": float(step)})
            checkpointer.wait()
    assert steps_in(tmp_path) == [2, 3]


def test_without_any_validation_the_newest_is_the_best(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
    assert restore_params(tmp_path, "best")[0] == 2


@pytest.mark.parametrize("made", [False, True], ids=["no folder", "empty folder"])
def test_a_run_without_checkpoints(tmp_path, made):
    if made:
        (tmp_path / "checkpoints").mkdir()
    before = list(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"checkpoints holds no checkpoint"):
        restore_params(tmp_path)
    assert list(tmp_path.rglob("*")) == before


def test_a_step_without_checkpoint(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
    with pytest.raises(UserError, match=r"no checkpoint of step 5, only of 1, 2$"):
        restore_params(tmp_path, 5)


def test_a_checkpoint_that_was_not_finished_is_ignored(tmp_path):
    """What a process leaves behind that is killed while it saves."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, make_state(1))
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    assert restore_params(tmp_path, "last")[0] == 1
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 1
        checkpointer.save(2, make_state(2))
    assert restore_params(tmp_path, "last")[0] == 2
