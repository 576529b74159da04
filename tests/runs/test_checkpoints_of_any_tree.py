"""Checkpoints of states that are not those of the trainer, and run folders of their parameters."""

import collections
import dataclasses
import json
import os
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_params import drawn_params
from flax.core import FrozenDict
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flaxformer_mt as fmt
from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.checkpoint import restore_params
from flaxformer_mt.trained_model import describe_run

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_params(seed):
    return {"layers": {"kernel": jax.random.normal(jax.random.key(seed), (8, 16))}}


def as_dict(seed):
    params = make_params(seed)
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(seed)}


def as_flax(seed):
    return FlaxState.create(apply_fn=print, params=make_params(seed), tx=OPTIMIZER)


def as_pair(seed):
    """Neither a dict nor a dataclass."""
    return make_params(seed), [jnp.float32(seed), jnp.arange(seed)]


def as_numbers(seed):
    """Orbax by itself fails on scalars of NumPy."""
    return {"params": {"x": np.float32(seed)}, "step": seed, "rate": 0.5, "n": np.int32(seed)}


def as_ordered_dict(seed):
    """JAX keeps its order, which is not that of the names."""
    opt = collections.OrderedDict(second=jnp.int32(seed), first=FrozenDict(make_params(seed)))
    return collections.OrderedDict(step=seed, params=make_params(seed), ema=None, opt=opt)


STATES = [as_dict, as_flax, as_pair, as_numbers, as_ordered_dict]


def saved(folder, step, state, position=None, **options):
    with fmt.Checkpoints(folder) as checkpoints:
        checkpoints.save(step, state, position, **options)


def restored(folder, state, position=None):
    with fmt.Checkpoints(folder) as checkpoints:
        return checkpoints.restore_or(state, position)


@pytest.mark.parametrize("make", STATES)
def test_any_tree_is_restored_to_the_bit(tmp_path, make):
    saved(tmp_path, 3, make(3))
    state, _ = restored(tmp_path, make(3 if make is as_pair else 1))
    chex.assert_trees_all_equal(state, make(3))
    assert jax.tree.structure(state) == jax.tree.structure(make(3))
    for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(make(3)), strict=True):
        assert np.asarray(found).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("make", [as_dict, as_flax])
def test_abstract_templates_give_shardings(tmp_path, make):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def sharding(leaf):
        spec = PartitionSpec("fsdp", "tensor") if leaf.ndim == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    state = make(3)
    sharded = jax.device_put(state, jax.tree.map(sharding, jax.tree.map(jnp.asarray, state)))
    saved(tmp_path, 3, sharded)
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), sharded
    )
    found, _ = restored(tmp_path, template)
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(sharded))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(sharded), strict=True):
        assert one.sharding == other.sharding
    on_one, _ = restored(tmp_path, make(0))
    chex.assert_trees_all_equal(jax.device_get(on_one), jax.device_get(sharded))


@dataclasses.dataclass
class Place:
    file: int
    line: list[int]


class Custom:
    """A position that converts itself."""

    def __init__(self, offset):
        self.offset = offset

    def to_json(self):
        return {"at": self.offset}

    @classmethod
    def from_json(cls, values):
        return cls(values["at"])

    def __eq__(self, other):
        return isinstance(other, Custom) and self.offset == other.offset

    __hash__ = None


@pytest.mark.parametrize(
    ("position", "start"),
    [
        (DataPosition(1, 2, 3, 4), DataPosition()),
        (Place(1, [2, 3]), Place(0, [])),
        (Custom(7), Custom(0)),
        ({"epoch": 1, "rows": [1, 2]}, {}),
        (5, 0),
        (None, None),
    ],
)
def test_positions(tmp_path, position, start):
    saved(tmp_path, 1, as_dict(1), position)
    _, found = restored(tmp_path, as_dict(0), start)
    assert found == position
    assert type(found) is type(position)


def test_without_a_checkpoint_the_arguments_are_returned(tmp_path):
    state, start = as_dict(0), DataPosition()
    found = restored(tmp_path, state, start)
    assert found[0] is state
    assert found[1] is start


OTHER_KINDS = {
    "a leaf more": (lambda: {**as_dict(0), "extra": jnp.zeros(2)}, r"extra"),
    "a leaf less": (
        lambda: {name: leaf for name, leaf in as_dict(0).items() if name != "step"},
        r"step",
    ),
    "another shape": (
        lambda: as_dict(0) | {"params": {"layers": {"kernel": jnp.zeros((8, 4))}}},
        r"params/layers/kernel.*\[8, 16\].*\[8, 4\]",
    ),
    "another optimizer": (
        lambda: as_dict(0) | {"opt": optax.sgd(0.1, momentum=0.9).init(make_params(0))},
        r"opt/",
    ),
    "a tuple": (lambda: as_pair(3), r"opt/1/0/count: an array \[\] of integers there, nothing"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_another_kind_of_state_is_refused_by_its_paths(tmp_path, kind):
    make, path = OTHER_KINDS[kind]
    saved(tmp_path, 3, as_dict(3))
    with pytest.raises(UserError, match=path) as error:
        restored(tmp_path, make())
    assert "checkpoints/3 holds another kind of state" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_other_dtypes_are_converted_to_if_that_is_accepted(tmp_path):
    saved(tmp_path, 3, as_dict(3))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(0))
    with pytest.raises(UserError, match="params/layers/kernel: float32 there, bfloat16 here"):
        restored(tmp_path, as_dict(0) | {"params": half})
    with fmt.Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore_or(as_dict(0) | {"params": half}, {}, accept_changes=True)
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params(3))
    chex.assert_trees_all_equal(state["params"], expected)
    chex.assert_trees_all_equal_dtypes(state["params"], expected)


def test_another_kind_of_position_is_refused(tmp_path):
    saved(tmp_path, 3, as_dict(3), {"offset": 3})
    with pytest.raises(UserError, match=r"another kind of position than Place: \{'offset': 3\}$"):
        restored(tmp_path, as_dict(0), Place(0, []))


def test_a_state_without_parameters_is_one_line_for_those_who_want_them(tmp_path):
    saved(tmp_path, 3, as_pair(3))
    with pytest.raises(UserError, match=r"checkpoints/3 has no parameters.*'params'$"):
        restore_params(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    words = ["a dog runs", "a cat sleeps", "the dog sleeps", "the cat runs"]
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    file.write_text("".join(f"{text}\t{text.upper()}\n" for text in words * 20))
    tokenizers = fmt.train_tokenizers(fmt.read_pairs(str(file), columns=(1, 2)), size=300)
    config = fmt.TransformerConfig(
        d_model=16,
        num_heads=2,
        d_ff=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
        **tokenizers.fields,
    )
    return config, tokenizers, drawn_params(config)


def test_a_saved_run_is_a_run_folder(tmp_path, model):
    config, tokenizers, params = model
    folder = tmp_path / "new" / "run"
    fmt.save_run(folder, config, tokenizers, params, step=7)
    found = fmt.Run(folder).model()
    assert found.step == 7
    assert found.model == config
    assert found.tokenizers.source.fingerprint == tokenizers.source.fingerprint
    chex.assert_trees_all_equal(found.params, params)
    assert describe_run(folder)["step"] == 7
    assert json.loads((folder / "checkpoints" / "7" / "manifest.json").read_text())["files"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_embedding": {"embedding": jnp.zeros((9, 16))}}, "target_embedding/embedding has"),
        ({"target_embedding": {}}, "target_embedding/embedding is missing"),
        ({"decoder": {}}, "decoder/.* missing"),
    ],
)
def test_parameters_of_another_model_are_not_saved(tmp_path, model, changes, message):
    config, tokenizers, params = model
    with pytest.raises(UserError, match=message):
        fmt.save_run(tmp_path / "run", config, tokenizers, {**params, **changes})
    assert not (tmp_path / "run").exists()


def test_a_saved_run_is_replaced_if_it_is_nothing_else(tmp_path, model):
    config, tokenizers, params = model
    folder = tmp_path / "run"
    fmt.save_run(folder, config, tokenizers, params, step=7)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    with pytest.raises(UserError, match="overwrite=True"):
        fmt.save_run(folder, config, tokenizers, doubled)
    fmt.save_run(folder, config, tokenizers, doubled, step=9, overwrite=True)
    assert describe_run(folder)["step"] == 9
    assert os.listdir(folder / "checkpoints") == ["9"]
    chex.assert_trees_all_equal(fmt.Run(folder).model().params, doubled)
    fmt.save_run(tmp_path / "other", config, tokenizers, params, overwrite=True)
    assert os.listdir(tmp_path) == ["run", "other"] or os.listdir(tmp_path) == ["other", "run"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "notes.txt").write_text("mine"),
        lambda folder: (folder / "mine").mkdir(),
        lambda folder: (folder / "checkpoints/7/notes.txt").write_text("mine"),
        lambda folder: (folder / "metrics.jsonl").write_text("{}"),
        lambda folder: os.symlink(folder.parent, folder / "link"),
        lambda folder: shutil.copytree(folder / "checkpoints/7", folder / "checkpoints/8"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "config.json").rename(folder.parent / "elsewhere"),
        lambda folder: os.symlink(folder.rename(folder.parent / "elsewhere"), folder),
        lambda folder: (shutil.rmtree(folder), folder.write_text("mine")),
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        lambda folder: next((folder / "tokenizer").iterdir()).write_text("mine"),
    ],
)
def test_nothing_else_is_replaced(tmp_path, model, change):
    config, tokenizers, params = model
    folder = tmp_path / "run"
    fmt.save_run(folder, config, tokenizers, params, step=7)
    change(folder)
    before = {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    with pytest.raises(UserError, match="run"):
        fmt.save_run(folder, config, tokenizers, params, overwrite=True)
    assert {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
