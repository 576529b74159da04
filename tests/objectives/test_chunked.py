"""The loss without logits in memory is the loss of all logits, on every kind of device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.model.transformer import OutputFactors
from flaxformer_mt.objectives import chunked
from flaxformer_mt.objectives.chunked import CrossEntropyOptions, chunked_cross_entropy
from flaxformer_mt.objectives.distillation import Distillation
from flaxformer_mt.objectives.losses import accuracy, label_smoothed_cross_entropy
from flaxformer_mt.objectives.r_drop import RDrop

PAD = 3


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """The platform for which the loss chooses its order of computation."""
    monkeypatch.setattr(chunked, "mesh_platform", lambda: request.param)
    return request.param


@pytest.mark.slow_except("cpu-True-0.3-0.1-uniform-3", "gpu-True-0.3-0.1-non_pad_kl--1")
@pytest.mark.parametrize(
    ("convention", "pad_id"),
    [("uniform", 3), ("others", 3), ("others_kl", 3), ("non_pad_kl", 3), ("non_pad_kl", -1)],
)
@pytest.mark.parametrize(("biased", "scale", "smoothing"), [(True, 0.3, 0.1), (False, 1.0, 0.0)])
def test_the_chunked_loss_is_the_loss_of_all_logits(
    float64, platform, convention, pad_id, biased, scale, smoothing
):
    random = np.random.default_rng(0)
    shapes = (2, 6, 5), (11, 5), (11,)
    vectors, table, bias = (jnp.asarray(random.normal(size=shape)) for shape in shapes)
    targets = jnp.asarray(random.integers(0, 11, (2, 6)), jnp.int32).at[1, 5].set(pad_id % 11)
    weights = jnp.asarray(random.random((2, 6))).at[0, 2].set(0)
    factors = (vectors, table, bias) if biased else (vectors, table)

    def whole(vectors, table, bias=0.0):
        logits = (vectors @ table.T + bias) * scale
        loss, weight = label_smoothed_cross_entropy(
            logits, targets, weights, smoothing, convention, pad_id
        )
        return 2 * loss, (accuracy(logits, targets, weights)[0], weight)

    def in_parts(max_logits, vectors, table, bias=None):
        sums = chunked_cross_entropy(
            OutputFactors(vectors, table, bias, scale),
            targets,
            weights,
            CrossEntropyOptions(smoothing, convention, pad_id),
            max_chunk_logits=max_logits,
        )
        return 2 * sums.objective, (sums.correct, sums.weights)

    def with_gradients(function):
        return jax.jit(jax.value_and_grad(function, range(len(factors)), has_aux=True))(*factors)

    expected = with_gradients(whole)
    in_threes, whole_rows = (functools.partial(in_parts, size) for size in (2 * 3 * 11, 0))
    for in_chunks in (in_threes, whole_rows):
        chex.assert_trees_all_close(with_gradients(in_chunks), expected, atol=1e-12)
    chex.assert_trees_all_close(jax.jit(in_threes)(*factors), expected[0], atol=1e-12)


def test_the_weight_of_a_term_counts_once():
    random = np.random.default_rng(0)
    factors = [jnp.asarray(random.normal(size=size)) for size in ((4, 6, 5), (11, 5), (11,))]
    targets = jnp.repeat(jnp.asarray(random.integers(0, 11, (2, 6)), jnp.int32), 2, axis=0)

    def found(weight):
        def objective(*factors):
            options = CrossEntropyOptions(term=RDrop(weight))
            sums = chunked_cross_entropy(
                OutputFactors(*factors, 1.0), targets, jnp.ones((4, 6)), options
            )
            return sums.objective, (sums.loss, sums.term)

        return jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))(*factors)

    (none, (loss, _)), without = found(0.0)
    (once, (_, term)), one = found(1.0)
    (thrice, (_, same)), three = found(3.0)
    np.testing.assert_allclose([none, once, thrice], [loss, loss + term, loss + 3 * term], 1e-6)
    assert term == same > 1
    expected = jax.tree.map(lambda first, last: first + 3 * (last - first), without, one)
    chex.assert_trees_all_close(three, expected, atol=1e-4)


@pytest.mark.slow_except("cpu-r_drop", "gpu-distillation")
@pytest.mark.parametrize("term", [Distillation(0.3, 2.5), RDrop(5.0)], ids=lambda term: term.name)
def test_every_sum_is_differentiable_with_respect_to_every_input(float64, platform, term):
    """The gradient of a random mixture of all sums is that of their formulas on all logits."""
    random = np.random.default_rng(0)
    vectors, table, bias = (
        jnp.asarray(random.normal(size=size)) for size in ((4, 6, 5), (11, 5), (11,))
    )
    teacher = OutputFactors(
        *(jnp.asarray(random.normal(size=size)) for size in ((4, 6, 7), (11, 7))), None, 1.7
    )
    targets = jnp.asarray(random.integers(0, 11, (4, 6)), jnp.int32)
    weights = jnp.asarray(random.random((4, 6)))
    if term.passes == 2:
        targets, weights = (jnp.repeat(x[:2], 2, axis=0) for x in (targets, weights))
    mixture = random.normal(size=6)

    def capped(logits, cap):
        return cap * jnp.tanh(logits / cap)

    def whole(vectors, table, bias, weights):
        logits = capped((vectors @ table.T + bias) * 0.3, 2.0)
        loss, total = label_smoothed_cross_entropy(logits, targets, weights, 0.1)
        correct, _ = accuracy(logits, targets, weights)
        if term.passes == 2:
            p, q = jax.nn.softmax(logits[::2]), jax.nn.softmax(logits[1::2])
            each = jnp.sum((p - q) * jnp.log(p / q), axis=-1) / 2
            of_term = jnp.sum(each * weights[::2])
        else:
            log_p = jax.nn.log_softmax(teacher.vectors @ teacher.table.T * teacher.scale / 2.5)
            log_q = jax.nn.log_softmax(logits / 2.5)
            each = 2.5**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            of_term = jnp.sum(each * weights)
        z_loss = jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2 * weights)
        objective = term.loss_weight * loss + term.weight * of_term + 0.2 * z_loss
        return objective, loss, correct, total, of_term, z_loss

    def in_chunks(vectors, table, bias, weights):
        factors = OutputFactors(vectors, table, bias, 0.3, 2.0)
        options = CrossEntropyOptions(0.1, "uniform", PAD, term, z_loss=0.2)
        return chunked_cross_entropy(factors, targets, weights, options, teacher, 4 * 3 * 11)

    def differentiated(function):
        def mixed(*inputs):
            *inputs, factors = inputs
            sums = jnp.stack(function(*inputs))
            return jnp.sum(factors * sums), sums

        return jax.jit(jax.value_and_grad(mixed, (0, 1, 2, 3), has_aux=True))

    functions = differentiated(in_chunks), differentiated(whole)
    for factors in (mixture, np.eye(6)[0]):
        ours, theirs = (each(vectors, table, bias, weights, factors) for each in functions)
        chex.assert_trees_all_close(ours, theirs, rtol=1e-10, atol=1e-12)


LOSSES = {
    "cross-entropy": (fmt.cross_entropy, {"smoothing": 0.1, "z_loss": 0.1}),
    "R-Drop": (fmt.cross_entropy, {"term": RDrop(0.7), "key": jax.random.key(2)}),
    "distillation": (fmt.cross_entropy, {"term": Distillation(0.3, 2.5)}),
    "guided alignment": (fmt.guided_alignment, {"weight": 0.7, "z_loss": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_all_sums_are_those_of_finite_differences(float64, name):
    """All real numbers of `Sums`, with respect to all parameters, weights and links."""
    config = fmt.TransformerConfig(
        source_vocab_size=7, target_vocab_size=7, d_model=4, num_heads=2, d_ff=4,
        num_encoder_layers=1, num_decoder_layers=1, dtype="float64", param_dtype="float64",
    )  # fmt: skip
    params, teacher = (fmt.init(config, jax.random.key(seed)) for seed in range(2))
    tokens, weights = jnp.array([[3, 4, 5, 2]]), jnp.array([[1.0, 0.5, 2.0, 1.0]])
    links = jnp.array([[[1.0, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 1]]])
    loss, options = LOSSES[name]
    if name == "distillation":
        options = options | {"teacher": (config, teacher)}

    def sums(params, weights, linked):
        ids, positions = jnp.ones_like(tokens), jnp.arange(4)[None]
        inputs = tokens, jnp.roll(tokens, 1), tokens, weights
        # No link appears: that there is one is no number.
        alignment = jnp.where(links > 0, linked, 0)
        batch = fmt.Batch(*inputs, ids, ids, positions, positions, alignment=alignment)
        found = jax.tree.leaves(loss(config, params, batch, **options))
        assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in found)
        return found

    given = params, weights, links
    jax.test_util.check_grads(jax.jit(sums), given, order=1, modes=["rev"])


def test_a_term_that_needs_a_teacher_says_so():
    factors = OutputFactors(jnp.ones((1, 2, 4)), jnp.ones((7, 4)), None, 1.0)
    options = CrossEntropyOptions(term=Distillation())
    with pytest.raises(fmt.UserError, match="distillation needs a teacher"):
        chunked_cross_entropy(factors, jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2)), options)


def test_the_chunked_loss_never_holds_all_logits(platform):
    vectors, table = jnp.ones((2, 8, 4)), jnp.ones((13, 4))
    targets = jnp.zeros((2, 8), jnp.int32)

    def loss(vectors):
        options = CrossEntropyOptions(0.1, "uniform", PAD)
        factors = OutputFactors(vectors, table, None, 1.0)
        return chunked_cross_entropy(
            factors, targets, targets, options, max_chunk_logits=60
        ).objective

    program = str(jax.make_jaxpr(jax.grad(loss))(vectors))
    chunk, whole = {"cpu": ("[13,4]", "[13,16]"), "gpu": ("[4,128]", "[16,128]")}[platform]
    assert chunk in program  # two columns of two rows
    assert whole not in program


@pytest.mark.slow_except("gpu")
def test_the_chunked_loss_of_bfloat16_is_close_and_float32(platform):
    random = np.random.default_rng(0)
    vectors, table = (jnp.asarray(random.normal(size=shape)) for shape in ((2, 6, 8), (11, 8)))
    targets = jnp.asarray(random.integers(0, 11, (2, 6)), jnp.int32)
    arguments = targets, jnp.ones((2, 6)), CrossEntropyOptions(0.1, "uniform", PAD)

    def loss(vectors, table):
        factors = OutputFactors(vectors, table, None, 1.0)
        return chunked_cross_entropy(factors, *arguments).objective

    def with_gradients(vectors):
        return jax.value_and_grad(loss, argnums=(0, 1))(vectors, table)

    low, exact = with_gradients(vectors.astype(jnp.bfloat16)), with_gradients(vectors)
    assert (low[0].dtype, low[1][0].dtype, low[1][1].dtype) == ("float32", "bfloat16", "float32")
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x.astype(jnp.float32), low), exact, rtol=0.1, atol=0.02
    )


def test_rows_of_logits_may_be_far_from_zero_and_classes_impossible(monkeypatch):
    """Sums are relative to the highest logit of a class; what pads the vocabulary is none."""
    monkeypatch.setattr(chunked, "mesh_platform", lambda: "gpu")
    logits = jnp.array([-500.0, -501.0, -jnp.inf])
    factors = OutputFactors(jnp.zeros((1, 1, 1)), jnp.zeros((3, 1)), logits, 1.0)
    loss, _, correct, *_ = chunked_cross_entropy(
        factors, jnp.array([[1]]), jnp.ones((1, 1)), CrossEntropyOptions(0.0, "uniform", PAD)
    )
    np.testing.assert_allclose(loss, np.log1p(np.exp(1)), rtol=1e-6)
    assert correct == 0


@pytest.mark.parametrize(("platform", "chunks"), [("cpu", 4), ("gpu", 1), ("tpu", 1)])
def test_the_chunks_fit_the_platform_of_the_mesh(platform, chunks):
    vectors = jax.ShapeDtypeStruct((64, 16, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((2**14, 8), jnp.float32)
    targets = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    options = CrossEntropyOptions(0.1, "uniform", PAD)

    def loss(vectors, table, targets):
        factors = OutputFactors(vectors, table, None, 1.0)
        return chunked_cross_entropy(factors, targets, targets, options).objective

    device = jax.sharding.AbstractDevice("some device", 1, platform)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        program = str(jax.make_jaxpr(loss)(vectors, table, targets))
    assert f"length={chunks}\n" in program
