"""Objectives and optimizers of the trainer: functions, a frozen tree, a teacher, writers."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_params import drawn_params
from test_experiment import CONFIG

import flaxformer_mt as fmt
from flaxformer_mt.config.experiment import differences, with_changes
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import prepare
from flaxformer_mt.experiment.checks import check_config
from flaxformer_mt.experiment.start import recorded
from flaxformer_mt.trained_model import load_run


def squared(config, params, batch, key, frozen, *, factor=1.0):
    """A loss per sentence, without a metric called "loss"."""
    sums = fmt.cross_entropy(config, params, batch, key)
    sentences = jnp.sum(jnp.max(batch.decoder_segment_ids, axis=1), dtype=jnp.float32)
    return fmt.Sums(loss=factor * sums.loss, weight=sentences, tokens=sums.tokens)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without an objective of a user."""
    return fmt.train(CONFIG, tmp_path_factory.mktemp("runs") / "plain")


@pytest.mark.slow
def test_a_run_is_continued_with_its_objective_only(plain, tmp_path):
    folder = tmp_path / "run"
    objective = functools.partial(squared, factor=2.0)
    run = fmt.train(CONFIG, folder, objective=objective)
    assert run.config.train.objective == "squared(factor=2.0)"
    (training,) = run.metrics("train")
    tokens = training["target_tokens"]
    assert "loss" not in training
    assert training["objective"] > 0
    longer = with_changes(CONFIG, {"train": {"num_steps": 3}})
    with pytest.raises(UserError, match=r"train\.objective: squared\(factor=2\.0\) in the run"):
        fmt.train(longer, folder)
    with pytest.raises(UserError, match=r"train\.objective.* squared\(factor=3\.0\) now"):
        fmt.train(longer, folder, objective=functools.partial(squared, factor=3.0))
    with pytest.raises(UserError, match=r"is the name of a function: start and continue"):
        fmt.train(run.config, folder)
    assert fmt.train(longer, folder, objective=objective).latest_step == 3
    # The same text: cross-entropy counts the same tokens, although its weight is another one.
    assert plain.metrics("train")[0]["target_tokens"] == tokens


@pytest.mark.slow
def test_an_objective_reads_its_frozen_tree_and_writers_see_the_metrics(plain, tmp_path):
    class Tracker:
        """A writer, such as one of a tracking service."""

        def __init__(self):
            self.seen = []

        def rewind(self, step):
            self.seen.append(("rewind", step))

        def write(self, step, split, values, is_best=False):
            self.seen.append((step, split, sorted(values)))

        def close(self):
            self.seen.append("closed")

    def towards(config, params, batch, key, frozen):
        sums = fmt.cross_entropy(config, params, batch, key)
        distance = sum(
            jnp.sum((leaf - fixed) ** 2)
            for leaf, fixed in zip(jax.tree.leaves(params), jax.tree.leaves(frozen), strict=True)
        )
        return dataclasses.replace(sums, loss=distance, weight=jnp.float32(1))

    target = load_run(plain.folder, "last").params
    config = with_changes(
        CONFIG, {"train": {"num_steps": 60, "eval_every": 60}, "optimizer": {"warmup_steps": 5}}
    )
    tracker = Tracker()
    frozen = jax.tree.map(lambda leaf: leaf + 0.05, target)
    config = with_changes(
        config, {"train": {"init_from": str(plain.folder)}, "optimizer": {"learning_rate": 1e-3}}
    )
    run = fmt.train(config, tmp_path / "run", objective=towards, frozen=frozen, writers=[tracker])
    params = load_run(run.folder, "last").params

    def distance(tree):
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(frozen), strict=True)
        return sum(float(jnp.sum((leaf - fixed) ** 2)) for leaf, fixed in pairs)

    assert distance(params) < 0.5 * distance(target)
    assert tracker.seen[0] == ("rewind", 0)
    assert tracker.seen[-1] == "closed"
    assert {row[1] for row in tracker.seen[1:-1]} == {"train", "valid"}


@pytest.mark.slow
def test_a_run_learns_from_its_teacher(plain, tmp_path):
    options = {"train": {"teacher": str(plain.folder), "distillation_weight": 1.0}}
    with_teacher = with_changes(CONFIG, options)
    student = fmt.train(
        with_changes(with_teacher, {"data": {"tokenizer_path": str(plain.folder)}}),
        tmp_path / "student",
    )
    (training,) = student.metrics("train")
    assert 0 < training["distillation"] < training["loss"]
    stored = json.loads((student.folder / "config.json").read_text())["train"]
    assert stored["teacher"] == str(plain.folder)

    other = with_changes(with_teacher, {"data": {"vocab_size": 275}})
    with pytest.raises(
        UserError, match=r"train\.teacher=.* another source vocabulary: .*data.tokenizer_path"
    ):
        fmt.train(other, tmp_path / "other")
    missing = with_changes(CONFIG, {"train": {"teacher": "absent"}})
    with pytest.raises(UserError, match=r"train\.teacher=absent: there is no run folder absent"):
        fmt.train(missing, tmp_path / "missing")
    with pytest.raises(UserError, match=r"train\.r_drop=1\.0 cannot be used with train\.teacher"):
        with_changes(with_teacher, {"train": {"r_drop": 1.0}})


def test_a_step_says_what_its_state_lacks():
    mesh = fmt.make_mesh(devices=jax.devices()[:1])
    state = {"params": jnp.zeros(3)}
    with pytest.raises(UserError, match=r'needs the number of steps made, as state\["step"\]'):
        fmt.compile_step(lambda state, batch, key, frozen: (state, 0), mesh)(state, jnp.ones((1,)))

    def widened(state, batch, key, frozen):
        return {"params": jnp.zeros(4), "step": state["step"] + 1}, 0

    with pytest.raises(UserError, match=r"params was float32 \[3\] and is float32 \[4\]"):
        fmt.compile_step(widened, mesh)({**state, "step": jnp.int32(0)}, jnp.ones((1,)))


def test_a_frozen_tree_is_sharded_once_and_not_donated():
    mesh = fmt.make_mesh(fsdp=2, tensor=2)
    config = fmt.TransformerConfig(
        source_vocab_size=16, target_vocab_size=16, d_model=16, num_heads=2, d_ff=16
    )
    frozen = jax.device_get(drawn_params(config))
    seen = []

    def update(state, batch, key, frozen):
        seen.append(frozen)
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(frozen))
        return {"step": state["step"] + 1}, total

    step = fmt.compile_step(update, mesh, frozen=frozen)
    state = fmt.create(lambda key: {"step": jnp.int32(0)}, mesh)
    for _ in range(3):
        state, total = step(state, jnp.ones((8, 2)))
    assert len(seen) == 1
    assert int(state["step"]) == 3
    expected = sum(np.sum(leaf) for leaf in jax.tree.leaves(frozen))
    np.testing.assert_allclose(total, expected, rtol=1e-4)


def mine(schedule, *, b1=0.9):
    """An optimizer with a constant that its arguments do not tell."""
    return optax.adam(schedule, b1=b1, b2=CONSTANT)


CONSTANT = 0.5


def test_an_optimizer_is_recorded_with_its_options_and_constants(monkeypatch):
    config = recorded(CONFIG, optimizer=functools.partial(mine, b1=0.8)).optimizer
    assert config.kind == "mine(b1=0.8)"
    assert {"scale_by_adam.b1=0.8", "scale_by_adam.b2=0.5"} <= {
        each.rpartition("/")[2] for each in config.constants
    }
    of_optax = recorded(CONFIG, optimizer=optax.lion).optimizer
    assert of_optax.kind.startswith("lion(b1=0.9, b2=0.99, ")
    first = recorded(CONFIG, optimizer=mine)
    assert not differences(first, recorded(CONFIG, optimizer=mine))
    # The rate is that of the configuration, which is recorded by itself.
    faster = with_changes(CONFIG, {"optimizer": {"learning_rate": 0.5}})
    assert [*differences(first, recorded(faster, optimizer=mine))] == ["optimizer.learning_rate"]
    monkeypatch.setitem(globals(), "CONSTANT", 0.6)
    (line,) = differences(first, recorded(CONFIG, optimizer=mine)).values()
    assert re.search(r"constants: .*adam\.b2=0\.5'\] in the run, .*adam\.b2=0\.6'\] now", line)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.adam, "optimizer=adam has the name of a built-in one"),
        (lambda schedule: optax.adam(schedule), "has no name for the run to record"),
        (optax.constant_schedule, "must be a function that returns an optax.Gradient"),
    ],
)
def test_optimizers_that_cannot_be_recorded(optimizer, message):
    with pytest.raises((UserError, TypeError), match=message):
        recorded(CONFIG, optimizer=optimizer)


def short_first(epoch, lengths, columns, *, longest=8):
    return lengths[:, 1] <= longest * (epoch + 1)


def test_a_curriculum_is_recorded_and_shapes_the_batches(tmp_path):
    own = functools.partial(short_first, longest=6)
    config = recorded(CONFIG, curriculum=own)
    assert config.data.curriculum == "short_first(longest=6)"
    assert [*differences(config, recorded(CONFIG, curriculum=short_first))] == ["data.curriculum"]
    with pytest.raises(UserError, match=r"data.curriculum=short_first\(longest=6\) is the name of"):
        check_config(config)
    one_row = with_changes(CONFIG, {"train": {"batch_tokens": 64}})
    stream = prepare(one_row, tmp_path / "run", curriculum=own).dataset.training
    position, longest = stream.start, ([], [])
    while position.epoch < 2:
        epoch = position.epoch
        batch, position = stream.read(position)
        longest[epoch].append(np.bincount(batch.decoder_segment_ids[0])[1:].max())
    assert max(longest[0]) == 6 < max(longest[1])
    assert stream.batches_per_epoch == len(longest[0]) < len(longest[1])


@pytest.mark.slow  # By default, tests/test_promises.py kills a run.
def test_a_run_with_a_curriculum_continues_to_the_same_bits(tmp_path):
    config = with_changes(CONFIG, {"train": {"num_steps": 5}})
    whole = fmt.train(config, tmp_path / "whole", curriculum=short_first)
    hooks = fmt.Hooks()
    hooks.add_hook(lambda info: info.step == 3)
    stopped = fmt.train(config, tmp_path / "run", curriculum=short_first, hooks=hooks)
    assert stopped.latest_step == 3
    with pytest.raises(UserError, match=r"data\.curriculum: short_first\(longest=8\) in the run,"):
        fmt.train(config, tmp_path / "run")
    run = fmt.train(config, tmp_path / "run", curriculum=short_first)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(load_run(each.folder, "last").params for each in (whole, run)),
    )


def test_an_objective_does_not_take_the_name_of_the_built_in_one():
    def cross_entropy(config, params, batch, key, frozen):
        return fmt.cross_entropy(config, params, batch, key)

    with pytest.raises(UserError, match="has the name of a built-in one"):
        recorded(CONFIG, objective=cross_entropy)


def test_a_function_is_needed_to_train_with_its_optimizer(tmp_path):
    config = with_changes(CONFIG, {"optimizer": {"kind": "adan"}})
    with pytest.raises(UserError, match=r"adan is none of adam, adamw, .* optimizer=FUNCTION"):
        fmt.train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_run_is_continued_with_its_optimizer_only(plain, tmp_path):
    def same(schedule):
        return optax.adam(schedule, b1=0.9, b2=0.98, eps=1e-9)

    run = fmt.train(CONFIG, tmp_path / "run", optimizer=same)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(load_run(each.folder, "last").params for each in (plain, run)),
    )
    longer = with_changes(CONFIG, {"train": {"num_steps": 3}})
    with pytest.raises(UserError, match=r"optimizer\.kind: same in the run, adam now"):
        fmt.train(longer, run.folder)
    with pytest.raises(UserError, match=r"optimizer\.kind: same in the run, mine\(b1=0\.9\) now"):
        fmt.train(longer, run.folder, optimizer=mine)
    assert fmt.train(longer, run.folder, optimizer=same).latest_step == 3
    # The state of an optimizer that is not given any more cannot be read.
    changed = with_changes(longer, {"train": {"num_steps": 4}})
    for other in (None, mine):
        with pytest.raises(UserError, match=r"kind: same in .*or another workdir, for a new run"):
            fmt.train(changed, run.folder, optimizer=other, accept_changes=True)
    lion = functools.partial(optax.lion, b1=0.8)
    folder = shutil.copytree(plain.folder, tmp_path / "copy")
    run = fmt.train(longer, folder, optimizer=lion, accept_changes=True)
    assert run.latest_step == 3
    assert run.config.optimizer.kind.startswith("lion(b1=0.8, b2=0.99")
