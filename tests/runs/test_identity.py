"""A script continues only what it began: the same data, vocabularies, model, and optimizer."""

import dataclasses
import inspect
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.config import DataConfig
from flaxformer_mt.config.fields import FieldRole, names_with
from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import states

WORDS = [*"abcdefgh"]
PAIRS = [(" ".join(WORDS[: 2 + n % 6]), " ".join(WORDS[n % 5 :])) for n in range(40)]
OTHERS = [(target, source) for source, target in reversed(PAIRS)]
SIZES = {"rows": 4, "length": (12, 16), "seed": 0}


def vocabulary(words):
    """A vocabulary of whole words, whose ids follow from how often each occurs."""
    pairs = [(word, word) for number, word in enumerate(words) for _ in range(9 - number)]
    return fmt.train_tokenizers(pairs, size=20, tokenizer="word")


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """The arguments of `packed` of the script that wrote a checkpoint."""
    file = tmp_path_factory.mktemp("text") / "pairs.tsv"
    file.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    languages = {"source_language": "en", "target_language": "de"}
    pairs = fmt.read_pairs(file, columns=(1, 2), **languages)
    tokenizers = vocabulary(WORDS)
    config = fmt.TransformerConfig(d_model=8, num_heads=2, d_ff=8, **tokenizers.fields)
    return {"pairs": pairs, "tokenizers": tokenizers, "config": config, **SIZES}


def corpora(tmp_path, *options):
    """Corpora of one text each, with these options of `read_pairs`."""
    files = [tmp_path / name for name in ("a.tsv", "b.tsv")]
    for file, pairs in zip(files, (PAIRS, OTHERS), strict=True):
        file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return [
        fmt.read_pairs(file, columns=(1, 2), **each)
        for file, each in zip(files, options, strict=True)
    ]


def with_model(**fields):
    return lambda began: {"config": dataclasses.replace(began["config"], **fields)}


def short_first(epoch, lengths, columns):
    return lengths[:, 0] <= 8 * (epoch + 1)


CHANGES = {
    "pairs": lambda _: {"pairs": OTHERS},
    "source vocabulary": lambda _: {"tokenizers": vocabulary(WORDS[::-1])},
    "rows": lambda _: {"rows": 8},
    "source_row_length": lambda _: {"length": (13, 16)},
    "target_row_length": lambda _: {"length": (12, 17)},
    "seed": lambda _: {"seed": 1},
    "mixture_temperature": lambda _: {"mixture_temperature": 2.0},
    "max_length_ratio": lambda _: {"max_length_ratio": 9.0},
    "max_words": lambda _: {"max_words": 90},
    "drop_identical": lambda _: {"drop_identical": True},
    "drop_duplicates": lambda _: {"drop_duplicates": True},
    "drop_wrong_script": lambda _: {"drop_wrong_script": True},
    "drop_wrong_language": lambda _: {"drop_wrong_language": 0.9},
    "subword_sampling": lambda _: {"subword_sampling": 0.1},
    "curriculum": lambda _: {"curriculum": short_first},
    "batching": lambda _: {"batching": "buckets", "bucket_lengths": (8, 16)},
    "bucket_lengths": lambda _: {"bucket_lengths": (8, 64)},
    "long_sentences": lambda _: {"long_sentences": "truncate"},
    "model.num_heads": with_model(num_heads=4),
    "model.dropout_rate": with_model(dropout_rate=0.3),
    "model.dtype": with_model(dtype="bfloat16"),
}


def test_every_argument_and_option_of_the_batches_is_tried(began):
    options = names_with(DataConfig, FieldRole.TOKENS, FieldRole.ROWS)
    assert CHANGES.keys() >= {*options}
    changed = {name for change in CHANGES.values() for name in change(began)}
    arguments = inspect.signature(fmt.packed).parameters.keys() - {"cache", "options"}
    assert changed >= arguments


@pytest.fixture(scope="module")
def saved(began, tmp_path_factory):
    """A folder with the checkpoint of a script, and the position in it."""
    folder, data = tmp_path_factory.mktemp("saved"), fmt.packed(**began)
    position = data.start
    for _ in range(3):
        _, position = data.read(position)
    with fmt.Checkpoints(folder) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(3)}, position)
    return folder, position


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_argument_is_refused_by_name(began, saved, name):
    folder, position = saved
    changed = CHANGES[name](began)
    other = fmt.packed(**began | changed)
    state = {"x": jnp.zeros(3)}
    with fmt.Checkpoints(folder) as checkpoints:
        with pytest.raises(UserError, match=rf"[(; ]{name}: .* there, .* here"):
            checkpoints.restore_or(state, other.start)
        _, found = checkpoints.restore_or(state, other.start, accept_changes=True)
    if name.startswith("model."):
        assert found == position._replace(stream=other.start.stream)
    else:
        assert found == DataPosition(position.epoch + 1, step=3, stream=other.start.stream)
    with pytest.raises(UserError, match=rf"in another stream of batches .*{name}"):
        other.batches(fmt.make_mesh(devices=jax.devices()[:1]), position)


def test_tags_weights_and_the_order_of_corpora_are_part_of_the_stream(began, tmp_path):
    def record(*options, swap=False):
        pairs = corpora(tmp_path, *options)[:: -1 if swap else 1]
        return fmt.packed(**began | {"pairs": pairs}).start.stream

    plain = record({}, {})
    assert record({}, {}) == plain
    assert record({}, {}, swap=True) != plain
    assert record({"weight": 2.0}, {}) != plain
    assert record({"tag": "<x>"}, {}) != plain


def test_unchanged_arguments_continue_to_the_bit(began, saved, tmp_path):
    folder, position = saved
    whole = fmt.packed(**began)
    # Where the tokens are kept, and who prepares the batches, changes none of them.
    again = fmt.packed(**began, cache=tmp_path, workers=0)
    with fmt.Checkpoints(folder) as checkpoints:
        state, found = checkpoints.restore_or({"x": jnp.zeros(3)}, again.start)
    assert found == position
    np.testing.assert_array_equal(state["x"], np.ones(3))
    for _ in range(5):
        (ours, found), (theirs, position) = again.read(found), whole.read(position)
        chex.assert_trees_all_equal(ours, theirs)


def state_of(optimizer):
    params = {"w": jnp.ones((3, 4))}
    return {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}


ADAM = optax.adam(1e-3)
OPTIMIZERS = {
    "state types": (optax.adabelief(1e-3), "opt/0: ScaleByAdamState there, ScaleByBeliefState"),
    "functions": (
        optax.adamax(1e-3),
        "optimizer/0/scale_by_adam: update_fn there.*0/scale_by_adamax: nothing there, update_fn",
    ),
    "a constant": (optax.adam(1e-3, b1=0.8), "scale_by_adam.b1: 0.9 there, 0.8 here"),
    "schedule": (optax.adam(optax.constant_schedule(1e-3)), "opt/1/count|scale_by_schedule"),
    "decay": (optax.adamw(1e-3), "add_decayed_weights"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_is_refused_by_name(tmp_path, name):
    other, message = OPTIMIZERS[name]
    with fmt.Checkpoints(tmp_path, optimizer=ADAM) as checkpoints:
        checkpoints.save(3, state_of(ADAM))
    for state in (state_of(other), jax.eval_shape(lambda: state_of(other))):
        with (
            fmt.Checkpoints(tmp_path, optimizer=other) as checkpoints,
            pytest.raises(UserError, match=message),
        ):
            checkpoints.restore_or(state, {})
    with fmt.Checkpoints(tmp_path, optimizer=optax.adam(1e-3)) as checkpoints:
        checkpoints.restore_or(state_of(ADAM), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optax.MultiSteps(ADAM, 2), optax.MultiSteps(optax.adamax(1e-3), 2)),
        (
            optax.chain(optax.clip_by_global_norm(1.0), ADAM),
            optax.chain(optax.clip_by_global_norm(2.0), ADAM),
        ),
        (
            optax.adam(optax.linear_schedule(0.0, 1.0, 100)),
            optax.adam(optax.linear_schedule(0.0, 1.0, 101)),
        ),
        (
            optax.multi_transform({"a": ADAM}, {"w": "a"}),
            optax.multi_transform({"a": optax.adamax(1e-3)}, {"w": "a"}),
        ),
        (optax.masked(ADAM, {"w": True}), optax.masked(ADAM, {"w": False})),
    ],
)
def test_optimizers_are_described_with_all_that_they_are_made_of(one, other):
    described = [states.of_optimizer(each.update) for each in (one, one, other)]
    assert described[0] == described[1]
    assert described[0] != described[2]
    assert json.loads(json.dumps(described[0])) == described[0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (optax.adamax(1e-3), "scale_by_adam: update_fn there"),
        (optax.adam(2e-3), "step_size: -0.001 there, -0.002 here"),
        (optax.adam(1e-3), None),
    ],
)
def test_the_optimizer_of_a_step_is_compared_without_being_named(tmp_path, other, message):
    def steps(optimizer, number, accept_changes=False):
        def update(state, batch, key, frozen):
            gradient = jax.tree.map(lambda w: w * batch, state["params"])
            with jax.numpy_dtype_promotion("standard"):
                updates, opt = optimizer.update(gradient, state["opt"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "opt": opt, "step": state["step"] + 1}, None

        mesh = fmt.make_mesh(devices=jax.devices()[:1])
        step = fmt.compile_step(update, mesh)
        with fmt.Checkpoints(tmp_path) as checkpoints:
            state = fmt.place(state_of(optimizer), mesh)
            state, _ = checkpoints.restore_or(state, None, accept_changes=accept_changes)
            for _ in range(number):
                state, _ = step(state, jnp.ones((1, 1)))
                checkpoints.save(int(state["step"]), state)
        return int(state["step"])

    assert steps(ADAM, 2) == 2
    if message is None:
        assert steps(other, 1) == 3
        return
    with pytest.raises(UserError, match=message):
        steps(other, 1)
    with fmt.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 2
    assert steps(other, 1, accept_changes=True) == 3
    with pytest.raises(UserError, match="there, "):
        steps(ADAM, 1)
