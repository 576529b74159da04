"""Optimizers on stacked layers: roles of parameters, and each layer by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from drawn_params import drawn_params

import flaxformer_mt as fmt
from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.training.optimizer import make_optimizer
from flaxformer_mt.training.parameters import is_matrix, per_layer, role_mask, role_of
from flaxformer_mt.training.sharding import leaves_by_path

CONFIG = fmt.TransformerConfig(
    source_vocab_size=20, target_vocab_size=24, d_model=8, num_heads=2, d_ff=16,
    num_encoder_layers=3, num_decoder_layers=2, tie_embeddings="none", output_bias=True,
    position_kind="learned", max_length=10,
)  # fmt: skip


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax mixes ints and floats, as scripts do by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def params():
    return drawn_params(CONFIG)


@pytest.fixture(scope="module")
def few(params):
    """Some parameters of each role: the program of an optimizer grows with their number."""
    layers = params["encoder"]["layers"]
    chosen = {name: layers[name] for name in ("feed_forward", "feed_forward_norm")}
    ends = {name: params[name] for name in ("source_embedding", "output")}
    return {"encoder": {"layers": chosen}, **ends}


def drawn(tree, seed):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), tree)


def test_every_parameter_has_a_role_and_no_rule_by_dimensions_would_do(params):
    roles = {path: role_of(path) for path, _ in leaves_by_path(params)}
    assert set(roles.values()) == {"kernel", "bias", "scale", "embedding", "output"}
    tables = ("source_embedding", "target_embedding", "source_positions", "target_positions")
    for path, leaf in leaves_by_path(params):
        in_layer, name = "layers" in path, path.rpartition("/")[2]
        assert is_matrix(path, leaf) == (in_layer and name == "kernel")
        assert roles[path] == ("output" if path == "output/kernel" else name)
        assert (roles[path] == "embedding") == path.startswith(tables)
        # What optax takes for a matrix is none here, and the other way round.
        assert not is_matrix(path, leaf) or leaf.ndim == 3


def test_roles_hold_in_the_state_of_an_optimizer(params):
    state = jax.eval_shape(optax.adam(1.0).init, {"params": params})
    ours = [is_matrix(path, leaf) for path, leaf in leaves_by_path(params)]
    theirs = [is_matrix(path, leaf) for path, leaf in leaves_by_path(state[0].mu)]
    assert ours == theirs
    assert any(ours)


def test_weight_decay_by_role(params):
    optimizer = optax.adamw(1.0, weight_decay=0.5, mask=role_mask("kernel", "output"))
    zero, ones = (jax.tree.map(like, params) for like in (np.zeros_like, np.ones_like))

    @jax.jit
    def update(zero, ones):
        return optimizer.update(zero, optimizer.init(ones), ones)[0]

    updates = update(zero, ones)
    for path, update in leaves_by_path(updates):
        is_decayed = path.endswith("kernel")
        np.testing.assert_array_equal(update, -0.5 if is_decayed else 0, path)


def test_a_mistyped_role_is_refused():
    with pytest.raises(fmt.UserError, match="there is no role 'kernels': use kernel, bias"):
        role_mask("kernels")


@pytest.mark.parametrize(
    "make",
    [lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4), lambda: optax.lamb(1e-2)],
    ids=["adafactor", "lamb"],
)
def test_each_layer_is_updated_as_if_it_were_alone(few, make):
    stacked, alone = per_layer(make()), make()
    gradients = [drawn(few, seed) for seed in range(2)]

    @functools.partial(jax.jit, static_argnums=0)
    def trained(optimizer, params, gradients):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours = trained(stacked, few, gradients)
    layers = [tree["encoder"]["layers"] for tree in (few, ours, *gradients)]
    for number in range(2):
        start, wanted, *own = (jax.tree.map(lambda x, n=number: x[n], tree) for tree in layers)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
            wanted,
            trained(alone, start, own),
        )


def muon_step(weights, gradient, rate, momentum=0.95, decay=0.1):
    """The first step of Muon for one matrix, after the published code."""
    mean = (1 - momentum) * gradient
    of_mean, of_gradient = mean / (1 - momentum**2), gradient
    x = momentum * of_mean + (1 - momentum) * of_gradient
    x = (x.T if x.shape[0] > x.shape[1] else x) / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.T if gradient.shape != x.shape else x
    return weights - rate * (0.2 * max(x.shape) ** 0.5 * x + decay * weights)


def test_muon_is_that_of_its_source_on_every_layer(few, float64):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), few)
    rate, gradient = 0.01, drawn(params, 5)
    config = OptimizerConfig(kind="muon", weight_decay=0.1, epsilon=1e-8)
    optimizer = make_optimizer(config, optax.constant_schedule(rate))
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    new = dict(leaves_by_path(optax.apply_updates(params, updates)))
    gradients, matrices = dict(leaves_by_path(gradient)), 0
    for path, start in leaves_by_path(params):
        if is_matrix(path, start):
            for layer in range(len(start)):
                wanted = muon_step(
                    np.asarray(start[layer]), np.asarray(gradients[path][layer]), rate
                )
                np.testing.assert_allclose(new[path][layer], wanted, rtol=0, atol=1e-9)
                matrices += 1
        else:
            # The first step of Adam has the size of the rate.
            wanted = start - rate * (np.sign(gradients[path]) + 0.1 * start)
            np.testing.assert_allclose(new[path], wanted, rtol=0, atol=1e-6)
    assert matrices == 3 * 2


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_scripts_have_the_optimizer_of_the_trainer(few, kind):
    """As docs/library.md writes them."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: "matrix" if fmt.is_matrix(path, leaf) else "other", params
        )

    of_roles = {
        "matrix": fmt.per_layer(optax.contrib.muon(1e-2, consistent_rms=0.2)),
        "other": optax.adamw(1e-2, b2=0.98, eps=1e-9, weight_decay=0),
    }
    of_script = {
        "adafactor": fmt.per_layer(optax.adafactor(1e-2)),
        "muon": optax.partition(of_roles, labels),
    }[kind]
    of_trainer = make_optimizer(OptimizerConfig(kind=kind), optax.constant_schedule(1e-2))
    gradient = drawn(few, 2)
    ours, theirs = (
        jax.jit(each.update)(gradient, each.init(few), few)[0] for each in (of_trainer, of_script)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8)
    jax.tree.map(close, ours, theirs)
