"""Sharding rules of parameters, and the bytes that a device holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import flaxformer_mt as fmt
from benchmarks.compiled.program import collectives, parse
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.placement import ROW_AXES
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.attention import MultiHeadAttention
from flaxformer_mt.model.transformer import Embedding, Transformer
from flaxformer_mt.training.devices import abstract
from flaxformer_mt.training.sharding import (
    ACTIVATION_RULES,
    AXES,
    check_rules,
    leaves_by_path,
    shardings,
)

D, HEADS, F, V, L = 8, 2, 16, 20, 3
SIZES = {"data": 1, "fsdp": 2, "tensor": 2}


@functools.cache
def params(**overrides):
    """Shapes of the parameters of a model that has every kind of them."""
    model = Transformer(
        TransformerConfig(
            source_vocab_size=V,
            target_vocab_size=V,
            d_model=D,
            num_heads=HEADS,
            d_ff=F,
            num_encoder_layers=L,
            num_decoder_layers=L,
            max_length=6,
            position_kind="learned",
            final_norm=True,
            output_bias=True,
            **{"tie_embeddings": "none"} | overrides,
        )
    )
    tokens = jax.numpy.zeros((1, 1), jax.numpy.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]


def specs_of(tree, sizes=SIZES, rules=()):
    """Partition specs by path, on a mesh that need not exist."""
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    found = jax.tree.map(lambda leaf: leaf.spec, shardings(tree, mesh, rules))
    return dict(leaves_by_path(found))


LAYERS = "decoder/layers/"
SHARDED = {
    "target_embedding/embedding": ("tensor", "fsdp"),  # [V, D]
    "source_positions/embedding": (None, "fsdp"),  # [max_length, D]
    LAYERS + "self_attention/query/kernel": (None, "fsdp", "tensor"),  # [L, D, H*K]
    LAYERS + "cross_attention/key/kernel": (None, "fsdp", "tensor"),
    LAYERS + "cross_attention/value/bias": (None, "tensor"),
    LAYERS + "cross_attention/output/kernel": (None, "tensor", "fsdp"),  # [L, H*U, D]
    LAYERS + "cross_attention/output/bias": (None, None),
    LAYERS + "feed_forward/hidden/kernel": (None, "fsdp", "tensor"),  # [L, D, F]
    LAYERS + "feed_forward/hidden/bias": (None, "tensor"),
    LAYERS + "feed_forward/output/kernel": (None, "tensor", "fsdp"),  # [L, F, D]
    LAYERS + "feed_forward_norm/scale": (None, None),
    "output/kernel": ("fsdp", "tensor"),  # [D, V]
    "output/bias": ("tensor",),
}


@pytest.mark.parametrize(("path", "axes"), SHARDED.items())
def test_built_in_rules(path, axes):
    assert specs_of(params())[path] == PartitionSpec(*axes)


@pytest.mark.parametrize("tie", ["none", "all"])
def test_every_matrix_is_sharded_over_both_axes(tie):
    """A matrix without a rule would silently be replicated."""
    specs = specs_of(params(tie_embeddings=tie))
    for path, leaf in leaves_by_path(params(tie_embeddings=tie)):
        if path.endswith("kernel") or path.endswith("_embedding/embedding"):
            assert {"fsdp", "tensor"} <= set(specs[path]), (path, leaf.shape)


def test_an_axis_of_one_device_shards_nothing():
    specs = specs_of(params(), {"data": 8, "fsdp": 1, "tensor": 1})
    assert all(set(spec) <= {None} for spec in specs.values())


def test_user_rules_go_first_and_count_from_the_last_dimension():
    rules = [("hidden/kernel", "-,fsdp"), fmt.ShardingRule("encoder/.*norm/scale$", ("fsdp",))]
    specs = specs_of(params(), rules=rules)
    assert specs[LAYERS + "feed_forward/hidden/kernel"] == PartitionSpec(None, None, "fsdp")
    assert specs["encoder/final_norm/scale"] == PartitionSpec("fsdp")
    assert specs["encoder/layers/feed_forward_norm/scale"] == PartitionSpec(None, "fsdp")
    assert specs["decoder/final_norm/scale"] == PartitionSpec(None)


def test_a_dimension_that_cannot_be_divided_is_not_sharded_and_reported():
    sizes = {"data": 1, "fsdp": 2, "tensor": 8}
    assert specs_of(params(), sizes)["output/kernel"] == PartitionSpec("fsdp", None)
    not_divisible = check_rules(params(), sizes)
    assert "output/kernel [8, 20]: cannot divide 20 by tensor=8" in not_divisible
    assert not any("hidden" in line for line in not_divisible)


BROKEN_RULES = [
    (("kernel", "fsdp,model"), "mesh axis 'model': use data, fsdp, tensor, or None"),
    (("kernel", ("fsdp", ("data", "fsdp"))), "two dimensions over fsdp"),
    (("ker(nel", "fsdp"), "not a valid regular expression"),
    (("kernal$", ("fsdp",)), r"'kernal\$' matches no parameter; there are "),
    (("output/bias$", "-,-,fsdp"), "axes for 3 dimensions, but .* has only"),
    ("kernel$", "is not a sharding rule: give a list of pairs"),
]


@pytest.mark.parametrize(("rule", "message"), BROKEN_RULES)
def test_invalid_rules(rule, message):
    """Wherever they are given."""
    mesh, shapes = fmt.make_mesh(devices=jax.devices()[:1]), params()
    step = fmt.compile_step(lambda state, *_: (state, 0), mesh, rules=[rule])
    evaluate = fmt.compile_eval(lambda tree, _: 0, mesh, rules=[rule])
    create = lambda key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)  # noqa: E731
    for call in (
        lambda: check_rules(shapes, SIZES, [rule]),
        lambda: fmt.create(create, mesh, rules=[rule]),
        lambda: fmt.abstract(create, mesh, [rule]),
        lambda: fmt.place(shapes, mesh, [rule]),
        lambda: step.lower({"params": shapes, "step": jnp.int32(0)}, ()),
        lambda: evaluate.lower(shapes, ()),
    ):
        with pytest.raises(UserError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_rules_may_be_for_another_tree_of_the_step_and_smaller_means_do_not_count():
    rules = [("teacher/w", "fsdp"), ("hidden/kernel$", "-,fsdp,tensor")]
    means = {"opt": {"v_row": {"ff": {"hidden": {"kernel": np.zeros(4)}}}}}
    state = {"params": {"ff": {"hidden": {"kernel": np.zeros((2, 4, 4))}}}, **means}
    assert not check_rules(state, SIZES, rules, {"teacher": {"w": np.zeros(4)}})
    with pytest.raises(UserError, match="axes for 3 dimensions, but opt/v_row/ff/hidden"):
        check_rules(means, SIZES, rules[1:])


def test_optimizer_state_and_average_are_sharded_like_the_parameters(setup):
    tiny = setup.of(num_devices=8, parallel={"fsdp": 2, "tensor": 2}, ema_decay=0.9)
    state = abstract(tiny.state_shapes, tiny.devices.mesh, tiny.devices.rules)
    specs = dict(leaves_by_path(jax.tree.map(lambda leaf: leaf.sharding.spec, state.params)))
    assert specs["decoder/layers/feed_forward/hidden/kernel"] == PartitionSpec(
        None, "fsdp", "tensor"
    )
    found = {path: leaf.sharding.spec for path, leaf in leaves_by_path(state)}
    for path, spec in specs.items():
        for owner in ("params", "ema", "opt_state/0/mu", "opt_state/0/nu"):
            assert found[f"{owner}/{path}"] == spec
    for path in ("opt_state/0/count", "step"):
        assert set(found[path]) <= {None}


@pytest.mark.parametrize("owner", ["model", "params", "ema/0"])
def test_any_tree_is_sharded_by_the_ends_of_its_paths(owner):
    """The output projection is the only one whose name is also the end of others."""
    tree = params()
    for name in reversed(owner.split("/")):
        tree = {name: tree}
    found = specs_of({"state": tree})
    for path, axes in SHARDED.items():
        assert found[f"state/{owner}/{path}"] == PartitionSpec(*axes)


@pytest.mark.slow_except("parallel3")
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        {"tensor": 2},
        pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
        {"fsdp": 2, "tensor": 2},
    ],
)
def test_bytes_of_a_device_shrink_as_the_rules_say(setup, parallel):
    """Of parameters and of optimizer state, with two moments per parameter and two counters."""
    tiny = setup.of(num_devices=8, parallel=parallel)
    state = tiny.created_state()
    fsdp, tensor = parallel.get("fsdp", 1), parallel.get("tensor", 1)
    expected = 0
    for path, leaf in leaves_by_path(state.params):
        if path.endswith(("kernel", "embedding")):
            expected += leaf.nbytes // (fsdp * tensor)
        elif path.endswith(("query/bias", "key/bias", "value/bias", "hidden/bias")):
            expected += leaf.nbytes // tensor
        else:
            expected += leaf.nbytes
    for device in jax.devices():
        assert bytes_on(device, state.params) == expected
        assert bytes_on(device, state.opt_state) == 2 * expected + 2 * 4


def bytes_on(device, tree):
    """Returns the bytes of some arrays that a device actually holds."""
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def on_mesh(function, *axes, tensor=2):
    """A function that is compiled for a mesh of eight devices, with two along fsdp.

    Args:
      function: its results are sharded like its arguments.
      axes: of each argument.
      tensor: number of devices along that axis.
    """
    devices = np.array(jax.devices()[:8]).reshape(-1, 2, tensor)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*each)) for each in axes)

    def traced(*arguments):
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            nn.logical_axis_rules(ACTIVATION_RULES),
        ):
            return function(*arguments)

    return jax.jit(traced, in_shardings=shardings, out_shardings=shardings)


def sent(step, *arguments):
    """The collective operations of a step."""
    return collectives(parse(step.lower(*arguments).compile().as_text()))


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_table_that_is_divided_is_not_gathered(tensor):
    """Neither for a lookup of many tokens nor for its gradient."""
    config = TransformerConfig(
        source_vocab_size=64, target_vocab_size=64, d_model=8, num_heads=2, d_ff=8
    )
    embedding, tokens = Embedding(config, 64), np.arange(2048, dtype=np.int32).reshape(64, 32) % 64
    table = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def loss(table, tokens):
        vectors = embedding.apply({"params": {"embedding": table}}, tokens)
        return jnp.sum(jnp.sin(vectors)), vectors

    gradient_of = jax.grad(loss, has_aux=True)
    step = on_mesh(gradient_of, ("tensor", "fsdp"), (ROW_AXES,), tensor=tensor)
    gathered = [each for each in sent(step, table, tokens) if each.kind == "all-gather"]
    assert not [each.result for each in gathered if "f32" in each.dtypes]

    gradient, vectors = step(table, tokens)
    expected, expected_vectors = gradient_of(table, tokens)
    np.testing.assert_array_equal(vectors, expected_vectors)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    outside = step(table, np.full_like(tokens, 64))[1]
    assert np.isnan(outside).all()


def test_gradients_of_query_key_and_value_are_added_up_before_they_are_sent():
    config = TransformerConfig(
        source_vocab_size=8, target_vocab_size=8, d_model=16, num_heads=4, d_ff=8
    )
    attention = MultiHeadAttention(config)

    def attend(attention, x):
        return attention(x, x, None, True)[0]

    x = jax.random.normal(jax.random.key(0), (8, 4, 16))
    init = jax.jit(functools.partial(attention.init, method=attend))
    params = init(jax.random.key(1), x)

    def gradient_of(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(attention.apply(params, x, method=attend))))(x)

    step = on_mesh(lambda x: (gradient_of(x),), (ROW_AXES,))
    # Of the output, and of the input's gradient.
    assert [each.kind for each in sent(step, x)] == ["all-reduce"] * 2
    np.testing.assert_allclose(step(x)[0], jax.jit(gradient_of)(x), atol=1e-5)
