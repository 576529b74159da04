"""Layers from outside the package: options, padding, losses of their own, and any mesh."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from test_experiment import CONFIG

import flaxformer_mt as fmt
from flaxformer_mt.config import ExperimentConfig, differences
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.experiment.start import recorded
from flaxformer_mt.model.layers import FEED_FORWARD
from flaxformer_mt.trained_model import load_run
from flaxformer_mt.training.devices import place

EXAMPLE = Path(__file__).parents[2] / "examples/mixture_of_experts.py"
MODEL = fmt.TransformerConfig(
    source_vocab_size=19, target_vocab_size=19, d_model=8, num_heads=2, d_ff=12,
    num_encoder_layers=1, num_decoder_layers=2, dropout_rate=0.0,
    feed_forward_kind="experts(balance=0.3)",
)  # fmt: skip


@pytest.fixture(autouse=True)
def experts(monkeypatch):
    """The network of the example, registered during a test."""
    monkeypatch.setattr(FEED_FORWARD, "classes", {**FEED_FORWARD.classes})
    spec = importlib.util.spec_from_file_location("mixture_of_experts", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Experts


def batch_of(rows=8, length=6):
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, 19, (rows, length)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[:, length - 2 :] = 0
    tokens[segments == 0] = 0
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    inputs = np.roll(tokens, 1, axis=1)
    weights = (segments > 0).astype(np.float32)
    return fmt.Batch(tokens, inputs, tokens, weights, segments, segments, positions, positions)


def sums_of(config, params, batch):
    def loss(params):
        sums = fmt.cross_entropy(config, params, batch)
        return sums.loss / sums.weight, sums

    gradient, sums = jax.grad(loss, has_aux=True)(params)
    return gradient, sums


@pytest.fixture(scope="module")
def params():
    # The parameters of the example, without registering it for other modules.
    before = {**FEED_FORWARD.classes}
    spec = importlib.util.spec_from_file_location("mixture_of_experts", EXAMPLE)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    try:
        return drawn_params(MODEL)
    finally:
        FEED_FORWARD.classes = before


def test_the_loss_of_a_layer_is_part_of_the_objective_and_padding_is_not_routed(params):
    batch = batch_of()
    gradient, sums = jax.jit(sums_of, static_argnums=0)(MODEL, params, batch)
    balance, tokens = sums.metrics["balance"]
    without = dataclasses.replace(MODEL, feed_forward_kind="experts(balance=0.0)")
    bare, bare_sums = jax.jit(sums_of, static_argnums=0)(without, params, batch)
    assert float(balance) > 0.3 * float(tokens)  # At least 1 in each of the layers.
    np.testing.assert_allclose(sums.loss, bare_sums.loss + balance, rtol=1e-6)
    differs = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), gradient, bare)
    assert differs["decoder"]["layers"]["feed_forward"]["router"]

    # Whatever is in the padding, the experts' load is that of the tokens.
    other = batch.encoder_input_tokens.copy()
    other[batch.encoder_segment_ids == 0] = 7
    changed = dataclasses.replace(batch, encoder_input_tokens=other)
    _, with_other_padding = jax.jit(sums_of, static_argnums=0)(MODEL, params, changed)
    np.testing.assert_array_equal(with_other_padding.metrics["balance"][0], balance)


def test_losses_of_layers_survive_loops_and_recomputation(params):
    batch = batch_of()
    config = dataclasses.replace(MODEL, scan_layers=False, remat="full")
    ours, theirs = (
        jax.jit(sums_of, static_argnums=0)(each, params, batch) for each in (MODEL, config)
    )
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, ours, theirs)


EXPERTS = [("feed_forward/(wide|narrow)$", ("experts", None, None))]


@pytest.mark.slow_except("{'experts': 4}")
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"experts": 4}], ids=str)
def test_a_router_is_trained_alike_on_every_mesh(params, axes):
    batch = batch_of()

    def update(state, batch, key, frozen):
        gradient, sums = sums_of(MODEL, state["params"], batch)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, state["params"], gradient)
        return {"params": params, "step": state["step"] + 1}, sums

    mesh = fmt.make_mesh(**axes)
    rules = EXPERTS if "experts" in mesh.shape else ()
    state = place({"params": params, "step": jnp.int32(0)}, mesh, rules)
    step = fmt.compile_step(update, mesh, seed=0, rules=rules)
    state, sums = step(jax.tree.map(jnp.copy, state), jax.tree.map(jnp.asarray, batch))
    wide = state["params"]["encoder"]["layers"]["feed_forward"]["wide"]
    assert wide.sharding.shard_shape(wide.shape)[1] == (1 if rules else 4)
    found = jax.device_get((state["params"], sums))
    gradient, sums = jax.jit(sums_of, static_argnums=0)(MODEL, params, batch)
    expected = jax.tree.map(lambda x, g: x - 0.1 * g, params, gradient), sums
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), found, expected
    )


@pytest.mark.slow
def test_a_run_with_experts_on_an_axis_of_their_own_continues_to_the_same_bits(tmp_path):
    rules = (("feed_forward/(wide|narrow)$", "experts,-,-"),)
    own = {"num_devices": 8, "axes": ("experts=2",), "sharding_rules": rules}
    own["activations"] = (("embed", "experts"),)
    of_all = {"model": {"feed_forward_kind": "experts"}, "train": {"num_steps": 4, "log_every": 1}}
    config = with_changes(CONFIG, of_all)
    sharded = with_changes(config, {"parallel": own})
    hooks = fmt.Hooks()
    hooks.add_hook(lambda info: info.step == 3)
    fmt.train(sharded, tmp_path / "run", hooks=hooks)
    runs = [
        fmt.train(sharded, tmp_path / "run"),
        fmt.train(sharded, tmp_path / "whole"),
        fmt.train(config, tmp_path / "one"),
    ]
    ours, whole, _ = (load_run(run.folder, "last").params for run in runs)
    jax.tree.map(np.testing.assert_array_equal, ours, whole)
    losses = [[line["loss"] for line in run.metrics("train")] for run in runs]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)


def test_options_are_recorded_and_checked(experts):
    assert FEED_FORWARD.resolved("experts(top=1)") == "experts(balance=0.01, count=4, top=1)"
    assert FEED_FORWARD.resolved("dense") == "dense"
    config = ExperimentConfig(model=MODEL)
    stored = recorded(config)
    assert not differences(stored, recorded(config))
    # Other defaults of the class are another model.
    other = dataclasses.make_dataclass("Other", [("top", int, 1)], bases=(experts,))
    fmt.register_feed_forward("experts")(other)
    (line,) = differences(stored, recorded(config)).values()
    assert "top=2) in the run" in line
    assert "top=1) now" in line
    for kind, message in (
        (
            "experts(tops=1)",
            "experts has no option 'tops' ",
        ),
        ("experts(top=1.5)", "top=1.5 must be of type int"),
        ("experts(1)", "is not of the form NAME"),
        ("experts(top=", "is not of the form NAME"),
        ("nothing", "feed_forward_kind=nothing is not registered: import the file"),
    ):
        with pytest.raises(fmt.UserError, match=message):
            FEED_FORWARD.of(kind)
    with pytest.raises(TypeError, match="subclass of FeedForward"):
        fmt.register_feed_forward("mine")(fmt.MultiHeadAttention)
    with pytest.raises(fmt.UserError, match="dense is the built-in"):
        fmt.register_feed_forward("dense")
