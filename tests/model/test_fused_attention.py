"""Fused attention against the einsum, in the interpreter."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flaxformer_mt.errors import UserError
from flaxformer_mt.model import kernels
from flaxformer_mt.model.attention import scaled_dot_product_attention
from flaxformer_mt.model.kernels.attention_blocks import Operands, kept_weights
from flaxformer_mt.model.kernels.fused_attention import (
    PLATFORMS,
    AttentionCase,
    AttentionInputs,
    AttentionOptions,
    _specs,
    choose_backend,
    fused_attention,
)
from flaxformer_mt.model.masks import causal_mask, segment_mask
from flaxformer_mt.model.numerics import random_uint16
from flaxformer_mt.training.sharding import ACTIVATION_RULES
from tests.backends import BACKENDS, needs_gpu_interpreter

B, H = 2, 2
DROPPED = round(0.25 * 2**16)


def case(queries, keys, *, width=32, bias=False, dropout=False, packed=False, dtype=jnp.float32):
    """Packed rows of unequal lengths: source sentences without target, and targets without source.

    In both rows some queries and keys are padding; sentence 2 of the first row has queries only.
    """
    rng = np.random.default_rng(queries + keys)
    shapes = (B, H, queries, width), (B, H, keys, width), (B, H, keys, width)
    query, key, value = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)

    def segments(length, lengths):
        rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in lengths]
        return jnp.asarray([np.pad(row, (0, length - len(row))) for row in rows], jnp.int32)

    inputs = AttentionInputs(
        query,
        key,
        value,
        segments(queries, [(queries // 3, queries // 4, queries // 5), (queries // 2,)]),
        segments(keys, [(keys // 2, 0, keys // 4), (keys // 3, keys // 2)]),
        jnp.asarray(rng.normal(size=(B, H, queries, keys)), jnp.float32) if bias else None,
        jax.random.key(3) if dropout else None,
    )
    if not packed:
        return inputs
    of_query, of_value = jnp.asarray(rng.normal(size=(2, H, width)), dtype)
    vectors = jnp.stack([x.swapaxes(1, 2) for x in inputs[:3]], axis=3)
    return inputs._replace(
        query=vectors, key=None, value=None, query_bias=of_query, value_bias=of_value
    )


def unpacked(inputs):
    """The same with separate vectors, which have the biases."""
    if not inputs.is_packed:
        return inputs
    query, key, value = jnp.moveaxis(inputs.query, 3, 0).swapaxes(2, 3)
    query, value = query + inputs.query_bias[:, None], value + inputs.value_bias[:, None]
    return inputs._replace(query=query, key=key, value=value, query_bias=None, value_bias=None)


def reference(inputs, causal, backend="pallas_tpu"):
    """The same by `scaled_dot_product_attention`, with a dense mask and the same random numbers."""
    query, key, value, query_segments, key_segments, bias, dropout_key = unpacked(inputs)[:7]
    mask = segment_mask(query_segments, key_segments)
    if causal:
        mask &= causal_mask(query.shape[2])

    def dropout(weights):
        if backend == "pallas_gpu":
            words = jax.random.bits(dropout_key, (*weights.shape[:3], 1), jnp.uint32)
            keys = jnp.arange(weights.shape[3], dtype=jnp.uint32)
            kept = kept_weights(words, keys, DROPPED)
        else:
            kept = random_uint16(dropout_key, weights.shape) >= DROPPED
        return jnp.where(kept, weights / (1 - DROPPED / 2**16), 0)

    dropout = None if dropout_key is None else dropout
    return scaled_dot_product_attention(query, key, value, mask, dropout, bias=bias)[0]


def value_and_gradients(attend, inputs):
    floats = {
        name: x
        for name, x in inputs._asdict().items()
        if name not in ("query_segments", "key_segments", "dropout_key") and x is not None
    }
    shape = unpacked(inputs).query.shape
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=shape))

    @jax.jit
    def run(floats):
        context, vjp = jax.vjp(lambda floats: attend(inputs._replace(**floats)), floats)
        return context, vjp(cotangent.astype(context.dtype))[0]

    return run(floats)


CASES = {
    "cross": ((64, 192), {}, False),
    "everything": ((70, 70), {"bias": True, "dropout": True}, True),
    # Sentence 3 of the first row crosses a border of blocks.
    "packed": ((100, 100), {"bias": True, "dropout": True, "packed": True}, True),
    "width_64": ((64, 64), {"width": 64}, True),
    "width_128": ((64, 64), {"width": 128}, False),
}


@pytest.mark.slow_except("packed-pallas_gpu")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_einsum_and_its_gradients(backend, name):
    lengths, switches, causal = CASES[name]
    if backend == "pallas_tpu":  # It takes no packed vectors.
        switches = switches | {"packed": False}
    inputs = case(*lengths, **switches)
    dropped = DROPPED if inputs.dropout_key is not None else 0
    options = AttentionOptions(backend, causal, dropped, interpret=True)
    fused = value_and_gradients(lambda inputs: fused_attention(options, inputs), inputs)
    expected = value_and_gradients(lambda inputs: reference(inputs, causal, backend), inputs)
    chex.assert_trees_all_close(fused, expected, atol=2e-5)
    assert np.all(fused[0][0, :, lengths[0] * 9 // 10 :] == 0)  # Padding attends to nothing.


def test_dropout_on_gpus_keeps_independent_weights():
    """Mean and variance over seeds: of all weights, of each key, of each query, and of pairs."""
    seeds, queries, keys, kept = 20, 64, 256, 1 - DROPPED / 2**16

    def mask(seed):
        words = jax.random.bits(jax.random.key(seed), (queries, 1), jnp.uint32)
        return kept_weights(words, jnp.arange(keys, dtype=jnp.uint32), DROPPED)

    drawn = np.asarray(jax.vmap(mask)(jnp.arange(seeds)), np.float64)
    deviations = (drawn - kept) / np.sqrt(kept * (1 - kept))
    one_number = deviations[..., :-1, :-1]
    pairs = {
        "itself": np.ones_like(one_number),
        "next key": deviations[..., :-1, 1:],
        "next query": deviations[..., 1:, :-1],
    }
    for name, other in pairs.items():
        product = one_number * other
        # Means of n numbers of variance 1, which few of 256 exceed by more than four times.
        for axes in ((0, 1, 2), (0, 1), (0, 2)):
            count = np.prod([product.shape[axis] for axis in axes])
            assert np.max(np.abs(product.mean(axes))) < 4.5 / np.sqrt(count), (name, axes)
    assert abs(np.mean(deviations**2) - 1) < 0.01


@pytest.mark.slow_except("True-pallas_tpu")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_sentence_does_not_depend_on_its_neighbours_at_all(backend, causal):
    """Outputs, and gradients of the first sentence's outputs, are the same bit for bit."""
    inputs = case(70, 70)
    options = AttentionOptions(backend, causal, 0, interpret=True)
    first = (inputs.query_segments == 1)[:, None, :, None]
    first_keys = (inputs.key_segments == 1)[:, None, :, None]
    moved = inputs._replace(
        query=jnp.where(first, inputs.query, -inputs.query),
        key=jnp.where(first_keys, inputs.key, 3 + inputs.key),
        value=jnp.where(first_keys, inputs.value, 1e6),
    )

    @jax.jit
    def run(query, key, value):
        def of_first(*vectors):
            changed = inputs._replace(**dict(zip(("query", "key", "value"), vectors, strict=True)))
            context = jnp.where(first, fused_attention(options, changed), 0)
            return jnp.sum(context**2), context

        return jax.grad(of_first, argnums=(0, 1, 2), has_aux=True)(query, key, value)

    (before, context), (after, moved_context) = run(*inputs[:3]), run(*moved[:3])
    chex.assert_trees_all_equal(context, moved_context)
    for x, y, visible in zip(before, after, (first, first_keys, first_keys), strict=True):
        chex.assert_trees_all_equal(jnp.where(visible, x, 0), jnp.where(visible, y, 0))
        assert np.all(np.where(visible, 0, y) == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_kernels_by_einsum")
@pytest.mark.parametrize("backend", PLATFORMS)
def test_on_a_mesh_every_device_computes_its_own_rows_and_heads(backend):
    """Without communication, and the same as on one device."""
    inputs = case(64, 70, bias=True, dropout=backend == "pallas_tpu")
    options = AttentionOptions(backend, False, DROPPED, interpret=True)

    @jax.jit
    def run(inputs):
        def loss(query, key, value):
            changed = inputs._replace(query=query, key=key, value=value)
            return jnp.sum(fused_attention(options, changed) ** 2, axis=(2, 3)), None

        total, vjp, _ = jax.vjp(loss, *inputs[:3], has_aux=True)
        return total, vjp(jnp.ones_like(total))

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    vectors = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = None if inputs.dropout_key is None else NamedSharding(mesh, PartitionSpec())
    shardings = AttentionInputs(vectors, vectors, vectors, rows, rows, vectors, whole)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(ACTIVATION_RULES),
    ):
        compiled = run.lower(
            jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                inputs,
                shardings,
            )
        ).compile()
    assert not [name for name in ("all-gather", "all-to-all") if name in compiled.as_text()]
    sharded = compiled(jax.device_put(inputs, shardings))
    assert sharded[0].sharding.is_equivalent_to(vectors, 2)
    chex.assert_trees_all_close(jax.device_get(sharded), run(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_bias_of_each_row_is_sharded_like_the_rows(rows):
    vectors, segments, bias = (2, 8, 2, 4), (2, 8), (rows, 2, 8, 8)
    operands = Operands(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [vectors] * 3 + [segments] * 2),
        jax.ShapeDtypeStruct(bias, jnp.float32),
    )
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(ACTIVATION_RULES),
    ):
        specs, _ = _specs(operands)
    assert specs.query[0] == "data"
    assert specs.bias == PartitionSpec(specs.query[0] if rows == 2 else None, specs.query[2])


LOWERED = {
    "packed": {"packed": True},
    "causal": {"causal": True, "width": 128},
    "cross": {"keys": 192, "groups": 2, "width": 32},
    "bias_and_dropout": {"bias": True, "dropout": True, "causal": True, "width": 16},
}


@pytest.mark.slow_except("bias_and_dropout")
@needs_gpu_interpreter
@pytest.mark.parametrize("name", LOWERED)
def test_it_is_lowered_for_gpus_without_one(name):
    """And without a warning that a part of JAX is deprecated."""
    given = {"keys": 256, "groups": 8, "width": 64, "packed": False, "causal": False}
    given |= {"bias": False, "dropout": False} | LOWERED[name]
    rows, queries, heads, groups, width = 4, 256, 8, given["groups"], given["width"]

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    of_keys = like(rows, groups, given["keys"], width)
    vectors = like(rows, heads, queries, width), of_keys, of_keys
    if given["packed"]:
        vectors = like(rows, queries, heads, 3, width), None, None
    segments = [like(rows, length, dtype=jnp.int32) for length in (queries, given["keys"])]
    bias = like(1, heads, queries, given["keys"], dtype=jnp.float32) if given["bias"] else None
    key = jax.eval_shape(lambda: jax.random.key(0)) if given["dropout"] else None
    dropped = DROPPED if given["dropout"] else 0
    options = AttentionOptions("pallas_gpu", given["causal"], dropped, interpret=False)

    def gradients(vectors, others):
        def total(vectors):
            arrays = AttentionInputs(*vectors, *others)
            return jnp.sum(fused_attention(options, arrays).astype(jnp.float32))

        return jax.grad(total)(vectors)

    biases = (like(heads, width, dtype=jnp.float32),) * 2 if given["packed"] else (None, None)
    traced = jax.jit(gradients).trace(vectors, (*segments, bias, key, *biases))
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("mosaic_gpu") >= 2


def a_case(**changes):
    dtype, shape = jnp.dtype("bfloat16"), (4, 8, 256, 64)
    simple = AttentionCase("gpu", "NVIDIA H100 80GB HBM3", dtype, shape, 256, 64)
    return simple._replace(**changes)


@pytest.fixture
def any_jax(monkeypatch):
    """The choice of a backend, as with a JAX that is new enough for all."""
    monkeypatch.setattr(kernels, "OLDEST_JAX", (0, 10))


def test_auto_takes_the_kernel_of_the_platform_where_it_can(any_jax):
    assert choose_backend("auto", a_case()) == "pallas_gpu"
    assert choose_backend("auto", a_case(platform="tpu")) == "pallas_tpu"
    for reason in (
        {"platform": "cpu"},
        {"dtype": jnp.dtype("float64")},
        {"value_width": 32},
        {"device_kind": "NVIDIA A100-SXM4-80GB"},
        {"dtype": jnp.dtype("float32")},
        {"query_shape": (4, 8, 256, 48), "value_width": 48},
        {"platform": "tpu", "query_shape": (4, 3, 256, 64)},
        {"platform": "tpu", "key_length": 2048},
    ):
        assert choose_backend("auto", a_case(**reason)) == "einsum", reason
    assert choose_backend("einsum", a_case()) == "einsum"


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        ("pallas_tpu", {}, "is for platform tpu, but this program is for gpu"),
        ("pallas_gpu", {"platform": "cpu"}, "is for platform gpu, but this program is for cpu"),
        ("pallas_gpu", {"dtype": jnp.dtype("float32")}, "computes in bfloat16, not in float32"),
        (
            "pallas_tpu",
            {"platform": "tpu", "dtype": jnp.dtype("float64")},
            "bfloat16 or float32, not in float64",
        ),
        ("pallas_gpu", {"device_kind": "NVIDIA A100"}, "Hopper generation.* not NVIDIA A100"),
        ("pallas_gpu", {"value_width": 32}, "values as wide as keys, not 32 and 64"),
        ("pallas_gpu", {"query_shape": (4, 8, 9, 48), "value_width": 48}, "128, not 48"),
        ("pallas_tpu", {"platform": "tpu", "query_shape": (4, 3, 9, 64)}, "not 3 x 64"),
        ("pallas_tpu", {"platform": "tpu", "key_length": 2048}, "at most 1024 keys, not 2048"),
    ],
)
def test_a_requested_backend_refuses_by_name_what_it_cannot_do(any_jax, backend, changes, why):
    with pytest.raises(UserError, match=rf"^model.attention_backend={backend} .*{why}: use auto"):
        choose_backend(backend, a_case(**changes))


def test_an_older_jax_has_no_kernel_for_gpus(monkeypatch):
    monkeypatch.setattr(kernels, "OLDEST_JAX", (100, 0))
    assert choose_backend("auto", a_case()) == "einsum"
    with pytest.raises(UserError, match=r"pallas_gpu needs JAX 0\.11 \(Python 3\.12\) or newer"):
        choose_backend("pallas_gpu", a_case())
