"""Checkpoints: bit-exact round trips, retention, other devices, missing and damaged ones."""

import collections
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from full_disks import files_no_longer_than, in_private_mounts
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxformer_mt import atomic, input_files
from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import manifest, step_folders
from flaxformer_mt.runs.checkpoint import (
    Checkpoints,
    restore_params,
    whole_checkpoints,
    write_params,
)
from flaxformer_mt.runs.manifest import write_manifest
from flaxformer_mt.training.optimizer import make_optimizer
from flaxformer_mt.training.state import TrainState


def make_state(step=0, num_devices=1, size=8, with_ema=False):
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
        ema=jax.tree.map(lambda leaf: leaf / 2, params) if with_ema else None,
    )
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.is_dir())


def save(folder, *steps, **options):
    """Writes checkpoints of these steps, all of which are kept; returns the path of the last."""
    with Checkpoints(folder, keep_last=10) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step, **options))
    return folder / "checkpoints" / str(steps[-1])


def entries(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("saved_on", "restored_on", "with_ema"), [(1, 1, False), (8, 1, True), (1, 8, False)]
)
def test_what_is_saved_is_restored_to_the_bit_on_other_devices(
    tmp_path, saved_on, restored_on, with_ema
):
    state = make_state(step=7, num_devices=saved_on, with_ema=with_ema)
    progress = {"sum": 0.1 + 0.2, "position": {"epoch": 3}}
    with Checkpoints(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(7, state, progress)
        assert checkpointer.latest_step() == 7
    template = make_state(step=0, num_devices=restored_on, with_ema=with_ema)
    with Checkpoints(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 7
        restored, restored_progress = checkpointer.restore_or(template, {})
    assert restored_progress == progress
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    chex.assert_trees_all_equal_dtypes(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding == like.sharding


def test_the_state_of_adafactor_is_restored(tmp_path):
    """It has places for parameters of other labels, which have no arrays."""
    optimizer = make_optimizer(OptimizerConfig(kind="adafactor"), optax.constant_schedule(1e-2))

    def state_of(step):
        state = make_state(step)
        params = {"encoder": state.params, "output": {"bias": jnp.ones(3)}}
        update = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params))
        _, opt_state = update(params)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    with Checkpoints(tmp_path) as checkpointer:
        checkpointer.save(7, state_of(7))
    with Checkpoints(tmp_path) as checkpointer:
        restored, _ = checkpointer.restore_or(state_of(0), {})
    chex.assert_trees_all_equal(restored, state_of(7))


@pytest.mark.parametrize("name", ["a[b]", "a\\b"])
def test_names_that_orbax_reads_as_patterns_are_refused(tmp_path, name):
    match = "use a name without brackets and backslashes"
    with pytest.raises(UserError, match=match):
        Checkpoints(tmp_path / name / "run")
    with pytest.raises(UserError, match=match):
        write_params(tmp_path / name, 1, {"x": np.arange(3.0)})
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["{lr}", "[x", "~", "$HOME", "a b#%*?"])
def test_other_names_are_written_to(tmp_path, name):
    write_params(tmp_path / name, 1, {"x": np.arange(3.0)})
    np.testing.assert_array_equal(restore_params(tmp_path / name)[1]["x"], np.arange(3.0))


@pytest.mark.parametrize("with_ema", [False, True])
def test_parameters_alone_come_to_one_device(tmp_path, with_ema):
    """If there is a moving average, it is what translates."""
    state = make_state(step=3, num_devices=8, with_ema=with_ema)
    with Checkpoints(tmp_path) as checkpointer:
        checkpointer.save(3, state)
    step, params = restore_params(tmp_path)
    assert step == 3
    chex.assert_trees_all_equal(params, jax.device_get(state.eval_params))
    chex.assert_trees_all_equal_dtypes(params, state.params)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(params))


def test_the_memory_of_a_saved_state_may_be_used_again(tmp_path):
    """The next step writes over a donated state while the checkpoint is still being written."""
    state = make_state(step=1, size=1500)
    expected = np.array(state.params["layers"]["kernel"])
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        jax.block_until_ready(overwrite(state))
    np.testing.assert_array_equal(restore_params(tmp_path)[1]["layers"]["kernel"], expected)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("bleu", {1: 30.0, 2: 10.0, 3: 20.0, 4: 5.0}, 1),
        # Without a validation, a checkpoint is never the best.
        ("loss", {1: None, 2: 1.0, 3: None, 4: 5.0}, 2),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, metric, values, best):
    with Checkpoints(tmp_path, keep_last=1, keep_best=1, best_metric=metric) as checkpointer:
        for step, value in values.items():
            others = {"ter": 0.5, "bleu_signature": "text"}
            values = None if value is None else {metric: value, **others}
            checkpointer.save(step, make_state(step), metrics=values)
            checkpointer.wait()
    assert steps_in(tmp_path) == sorted({best, 4})
    assert restore_params(tmp_path, "best")[0] == best
    assert restore_params(tmp_path, "last")[0] == 4
    step, params = restore_params(tmp_path, best)
    assert step == best
    chex.assert_trees_all_equal(params, make_state(best).params)


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    def remove(folder, step):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    save(tmp_path, 1)
    monkeypatch.setattr(step_folders, "remove", remove)
    wanted = r"checkpoints/1 could not be removed: Permission denied; all checkpoints are intact"
    with (
        pytest.raises(UserError, match=wanted),
        Checkpoints(tmp_path, keep_last=1, keep_best=0) as checkpointer,
    ):
        checkpointer.save(2, make_state(2))
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("made", [False, True], ids=["no folder", "empty folder"])
def test_a_run_without_checkpoints(tmp_path, made):
    if made:
        (tmp_path / "checkpoints").mkdir()
    before = list(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"checkpoints holds no checkpoint"):
        restore_params(tmp_path)
    assert list(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_was_not_finished_is_ignored(tmp_path):
    """What a process leaves behind that is killed while it saves or removes."""
    save(tmp_path, 1)
    with atomic.workspace(tmp_path / "checkpoints") as folder:
        (folder / "2.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
        shutil.copytree(folder, folder.with_name(f".flaxformer_mt-of-another{folder.suffix}"))
    assert restore_params(tmp_path, "last")[0] == 1
    with Checkpoints(tmp_path, announce=pytest.fail) as checkpointer:
        assert entries(tmp_path) == ["1"]
        assert checkpointer.latest_step() == 1
        checkpointer.save(2, make_state(2))
    assert restore_params(tmp_path, "last")[0] == 2


def largest(path):
    """The file that holds the parameters."""
    files = [file for file in (path / "params").rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def truncate(path):
    os.truncate(largest(path), 100)


def flip_a_bit(path):
    file = largest(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def delete_a_file(path):
    largest(path).unlink()


def delete_the_manifest(path):
    (path / "manifest.json").unlink()


def damage_the_manifest(path):
    os.truncate(path / "manifest.json", 20)


def change_the_progress(path):
    file = path / "progress.json"
    file.write_text(file.read_text().replace("{}", "[]"))


DAMAGES = [
    (truncate, r"params/\S+ is truncated: it has 100 of \d+ bytes"),
    (flip_a_bit, r"params/\S+ differs from its manifest: it is corrupted"),
    (delete_a_file, r"params/\S+ is missing"),
    (delete_the_manifest, r"manifest\.json is missing: the checkpoint is incomplete"),
    (damage_the_manifest, r"manifest\.json is damaged"),
    (change_the_progress, r"progress\.json differs from its manifest"),
]  # fmt: skip


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    save(folder, 1, 2, 3)
    return folder


@pytest.fixture
def copy(three_checkpoints, tmp_path):
    """A copy of a folder with checkpoints of steps 1, 2 and 3."""
    return shutil.copytree(three_checkpoints, tmp_path / "run")


@pytest.mark.parametrize(("damage", "cause"), DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(copy, damage, cause):
    damage(copy / "checkpoints" / "3")
    with pytest.raises(UserError, match=rf"checkpoints/3 is damaged: {cause}.*; give another chec"):
        restore_params(copy, "last")

    lines = []
    with Checkpoints(copy, keep_last=2, announce=lines.append) as checkpointer:
        assert checkpointer.latest_step() == 2
        restored, _ = checkpointer.restore_or(make_state(0), {})
        chex.assert_trees_all_equal(restored, make_state(2))
        assert entries(copy) == ["1", "2", "3.damaged"]
        # The run can write that step again; the damaged one does not count as one that is kept.
        checkpointer.save(3, make_state(3))
    (line,) = lines
    assert re.search(rf"checkpoints/3 is damaged: {cause}.*; moved to .*3\.damaged$", line)
    assert entries(copy) == ["2", "3", "3.damaged"]
    chex.assert_trees_all_equal(restore_params(copy, "last")[1], make_state(3).params)


def rewritten(path, changes):
    """Changes entries of the key-value store of a checkpoint, and lets its manifest fit."""
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{path / 'params'}/"}
    ).result()
    for key, change in changes.items():
        value = change(store.read(key).result().value)
        if value is None:
            store.delete_range(tensorstore.KvStore.KeyRange(key, key + "0")).result()
        else:
            store.write(key, value).result()
    write_manifest(path)


def large_chunk(rows):
    """Metadata of an array that is stored in one chunk of `rows` x `rows`."""
    return lambda text: json.dumps(json.loads(text) | {"chunks": [rows, rows]})


HOSTILE = {
    "a chunk that is missing": {"layers.kernel/0.0": lambda _: None},
    "a large chunk": {"layers.kernel/.zarray": large_chunk(30_000)},
    "metadata that are no JSON": {"layers.kernel/.zarray": lambda _: b"{"},
    "integers": {"layers.kernel/.zarray": lambda text: text.replace(b"<f4", b"<i4")},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_whose_manifest_fits_is_one_line(copy, name):
    path = copy / "checkpoints" / "3"
    rewritten(path, HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"checkpoints/3(:| is) damaged"):
        restore_params(copy, "last")
    with (
        Checkpoints(copy) as checkpoints,
        pytest.raises(UserError, match=r"checkpoints/3(: damaged| is damaged| holds another kind)"),
    ):
        checkpoints.restore_or(make_state(0), {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 500_000


@pytest.mark.parametrize("name", ["manifest.json", "progress.json"])
def test_a_checkpoint_that_cannot_be_opened_now_is_not_damaged(copy, monkeypatch, name):
    open_regular = input_files.open_regular

    def refuse(path, *arguments):
        if path == copy / "checkpoints" / "3" / name:
            raise OSError(errno.ESTALE, "Stale file handle")
        return open_regular(path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(input_files, "open_regular", refuse)
        with pytest.raises(UserError, match=rf"3/{name} cannot be read: Stale file handle"):
            Checkpoints(copy)
    assert entries(copy) == ["1", "2", "3"]
    with Checkpoints(copy) as checkpointer:
        assert checkpointer.latest_step() == 3


def test_a_damaged_earlier_checkpoint_is_not_kept_as_the_best(tmp_path):
    with Checkpoints(tmp_path, keep_last=10, keep_best=1) as checkpointer:
        for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
            checkpointer.save(step, make_state(step), metrics={"loss": loss})
    flip_a_bit(tmp_path / "checkpoints" / "1")
    lines = []
    with Checkpoints(tmp_path, keep_last=1, keep_best=1, announce=lines.append) as checkpointer:
        assert checkpointer.latest_step() == 3
        checkpointer.save(4, make_state(4), metrics={"loss": 4.0})
    assert len(lines) == 1
    assert entries(tmp_path) == ["1.damaged", "2", "4"]
    assert restore_params(tmp_path, "best")[0] == 2


def test_a_start_hashes_only_the_checkpoint_that_it_continues_from(copy, monkeypatch):
    hashed = collections.Counter()
    difference = manifest.difference

    def counted(path, entry, name):
        hashed[path.relative_to(copy / "checkpoints").parts[0]] += name.startswith("params")
        return difference(path, entry, name)

    monkeypatch.setattr(manifest, "difference", counted)
    with Checkpoints(copy, keep_last=2, keep_best=0) as checkpointer:
        assert +hashed == {"3": hashed["3"]}
        checkpointer.save(4, make_state(4))
        checkpointer.save(5, make_state(5))
    assert +hashed == {"3": hashed["3"]}
    assert entries(copy) == ["4", "5"]


def test_parameters_alone_can_be_used_but_not_trained_on(tmp_path):
    params = make_state(5).params
    write_params(tmp_path, 5, params)
    step, restored = restore_params(tmp_path)
    assert step == 5
    chex.assert_trees_all_equal(restored, params)
    with (
        Checkpoints(tmp_path) as checkpointer,
        pytest.raises(UserError, match=rf"parameters only.*train\.init_from={tmp_path}"),
    ):
        checkpointer.restore_or(make_state(0), {})


def test_a_manifest_names_every_file(tmp_path):
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }
    for name, entry in files.items():
        assert entry["bytes"] == (path / name).stat().st_size
        assert len(entry["sha256"]) == 64


# TensorStore tells the closed event loop of Orbax about the other arrays.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_write_is_one_error_and_leaves_nothing(tmp_path):
    """Although Orbax is writing other arrays when one cannot be written."""
    params = {
        f"{number}": jax.random.normal(jax.random.key(number), (99, 99)) for number in range(20)
    }
    state = dataclasses.replace(make_state(1), params=params, opt_state=params)
    with Checkpoints(tmp_path) as checkpointer:
        with files_no_longer_than(30_000):
            checkpointer.save(1, state)
            with pytest.raises(UserError, match=r"File too large$"):
                checkpointer.wait()
        assert checkpointer.latest_step() is None
        checkpointer.save(1, make_state(1))
        checkpointer.wait()
        with files_no_longer_than(30_000):
            checkpointer.save(2, state)
            with pytest.raises(UserError, match="too large; earlier checkpoints are intact"):
                checkpointer.wait()
        assert checkpointer.latest_step() == 1
        chex.assert_trees_all_equal(checkpointer.restore_or(make_state(0), {})[0], make_state(1))
    assert entries(tmp_path) == ["1"]


FAULTS = """
import os, resource, shutil, subprocess, sys, traceback
import jax.numpy as jnp
import numpy as np
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoint import Checkpoints
from flaxformer_mt.training.state import TrainState

def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)

def limit_descriptors(number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
# What happens before the first checkpoint, and after it.
faults = {
    "full": (lambda run: mount("-t", "tmpfs", "-o", "size=5m", "tmpfs", run), lambda run: None),
    "read-only": (
        lambda run: mount("--bind", run, run),
        lambda run: mount("-o", "remount,ro,bind", run),
    ),
    "descriptors": (lambda run: None, lambda run: limit_descriptors(24)),
}

def save_until_it_fails(run, after_the_first):
    params = {"kernel": np.random.default_rng(0).normal(size=(500, 500))}  # 2 MB
    with Checkpoints(run, keep_last=100) as checkpoints:
        for step in range(1, 20):
            checkpoints.save(step, TrainState(jnp.int32(step), params, ()))
            checkpoints.wait()
            if step == 1:
                after_the_first(run)

for name, (prepare, after_the_first) in faults.items():
    run = os.path.join(sys.argv[1], name, "run")
    os.makedirs(run)
    if os.fork():
        os.wait()
        continue
    # The backend is not initialized before, since its threads are not forked.
    error = os.open(os.path.join(sys.argv[1], name, "error"), os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    try:
        prepare(run)
        for _ in range(2):
            try:
                save_until_it_fails(run, after_the_first)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
            if name != "read-only":
                break
        limit_descriptors(limits[0])
        shutil.copytree(run, os.path.join(sys.argv[1], name, "kept"))
    except BaseException:
        traceback.print_exc()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """A folder for each fault: what the process said, and the run folder that it left."""
    folder = tmp_path_factory.mktemp("faults")
    result = in_private_mounts('"$1" -c "$2" "$3"', sys.executable, FAULTS, folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("descriptors", "Too many open files"),
    ],
)
def test_a_fault_is_one_error_and_what_was_written_before_is_whole(faults, fault, reason):
    run, kept = faults / fault / "run", faults / fault / "kept"
    said = (faults / fault / "error").read_text()
    # Reading removes the workspace, for whose removal there may have been too few descriptors.
    last, _ = restore_params(kept, "last")
    assert list(whole_checkpoints(kept, announce=pytest.fail)) == list(range(1, last + 1))
    assert entries(kept) == [str(step) for step in range(1, last + 1)]
    expected = [
        f"error: the checkpoint of step {last + 1} could not be written to {run}/checkpoints: "
        f"{reason}; earlier checkpoints are intact"
    ]
    if fault == "read-only":  # And at the next start.
        expected.append(f"error: {run}/checkpoints cannot be written to: {reason}")
    # Orbax may log errors of TensorStore before.
    assert [line for line in said.splitlines() if line.startswith("error: ")] == expected, said
    assert said.endswith(f"{expected[-1]}\n")
