"""The model and its kernels as functions of plain values."""

import dataclasses
import functools
import inspect
import re
import textwrap

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from drawn_params import drawn_params
from flax import linen as nn

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.model import functional
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.objectives.cross_entropy import cross_entropy

CONFIG = TransformerConfig(
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_encoder_layers=1,
    num_decoder_layers=1,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 23, size=(2, 9)), jnp.int32)
SEGMENTS = jnp.asarray([[1] * 4 + [2] * 4 + [0], [1] * 5 + [2] * 4], jnp.int32)
POSITIONS = jnp.asarray([[*range(4), *range(4), 0], [*range(5), *range(4)]], jnp.int32)
BATCH = Batch(TOKENS, TOKENS, TOKENS, jnp.ones((2, 9)), SEGMENTS, SEGMENTS, POSITIONS, POSITIONS)


params_of = functools.cache(drawn_params)


@pytest.mark.slow_except("residual_norm")
@pytest.mark.parametrize("name", ["init", "apply", "fused_attention", "residual_norm"])
def test_the_example_of_each_docstring_runs(name):
    text = inspect.getdoc(getattr(functional, name))
    example = "\n".join(re.findall(r"^    .*$", text.split("Args:")[0], re.MULTILINE))
    names = {"fmt": _Fmt, "jax": jax, "jnp": jnp}
    exec(textwrap.dedent(example), names)
    stated = re.search(r"# \[([\d, ]+)\]$", example)
    if stated:
        result = list(names.values())[-1]
        assert list(result.shape) == [int(size) for size in stated[1].split(",")]


class _Fmt:
    TransformerConfig = TransformerConfig
    init, apply = staticmethod(functional.init), staticmethod(functional.apply)
    fused_attention = staticmethod(functional.fused_attention)
    residual_norm = staticmethod(functional.residual_norm)


def test_a_language_model_needs_no_source():
    config = dataclasses.replace(CONFIG, has_inputs=False, num_encoder_layers=0)
    batch = {"decoder_input_tokens": TOKENS}
    apply = jax.jit(functional.apply, static_argnums=0)
    assert apply(config, params_of(config), batch).shape == (2, 9, 23)


def test_positions_without_segment_ids_are_refused():
    """Otherwise, packed rows would be read as one sentence each."""
    params = params_of(CONFIG)
    with pytest.raises(UserError, match="encoder_positions without encoder_segment_ids"):
        functional.apply(CONFIG, params, BATCH.replace(encoder_segment_ids=None))
    with pytest.raises(UserError, match="decoder_positions without decoder_segment_ids"):
        functional.apply(CONFIG, params, BATCH.replace(decoder_segment_ids=None))
    with pytest.raises(UserError, match="encoder_positions without encoder_segment_ids"):
        Transformer(CONFIG).apply(
            {"params": params}, TOKENS, encoder_positions=POSITIONS, method="encode"
        )
    with pytest.raises(UserError, match="the batch has no decoder_input_tokens"):
        functional.apply(CONFIG, params, {"encoder_input_tokens": TOKENS})


def attention_in_numpy(q, k, v, visible, bias):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1]) + bias
    weights = np.where(visible, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshu->bthu", weights / np.where(total == 0, 1, total), v)


@pytest.mark.slow_except("True-pallas_gpu")
@pytest.mark.usefixtures("gpu_kernels_by_einsum")
@pytest.mark.parametrize("backend", ["einsum", "pallas_gpu", "pallas_tpu"])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_attention_is_its_equation(backend, causal, monkeypatch):
    if backend != "einsum":  # As on the platform.
        monkeypatch.setattr(functional.kernels, "choose_backend", lambda *_: backend)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 9, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
    bias = rng.normal(size=(1, 1, 9, 9)).astype(np.float32)
    segments = np.asarray(SEGMENTS)
    visible = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    visible = visible & np.tri(9, dtype=bool) if causal else visible
    expected = attention_in_numpy(q, k, v, visible[:, None], bias)

    def attend(q, k, v, bias):
        arrays = {"segments": jnp.asarray(segments), "causal": causal, "bias": bias}
        return functional.fused_attention(q, k, v, **arrays)

    arrays = [jnp.asarray(x) for x in (q, k, v, bias)]
    np.testing.assert_allclose(attend(*arrays), expected, atol=2e-5)
    pair = functional.fused_attention(
        *arrays[:3], segments=(SEGMENTS, SEGMENTS), causal=causal, bias=arrays[3]
    )
    np.testing.assert_allclose(pair, expected, atol=2e-5)

    def gradients_of(*arrays):
        square = jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), argnums=(0, 1, 2, 3))
        return jax.jit(square)(*arrays)

    gradients = gradients_of(*arrays)
    monkeypatch.undo()
    derived = gradients_of(*arrays)
    chex.assert_trees_all_close(gradients, derived, atol=2e-4)


def test_the_tests_check_annotated_shapes():
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 2, 4))
    with pytest.raises(jaxtyping.TypeCheckError, match="fused_attention"):
        functional.fused_attention(q, k, k)


def test_forward_mode_is_refused_as_the_docstring_says():
    params = params_of(CONFIG)
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\)"):
        jax.jvp(lambda params: functional.apply(CONFIG, params, BATCH), (params,), (params,))


class _WithLogits(nn.Module):
    """A model that returns logits only."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, source, target, *, deterministic=True, project=True, **segments):
        return nn.Embed(23, 23)(target)


class _WithoutOption(_WithLogits):
    def __call__(
        self,
        source,
        target,
        deterministic=True,
        encoder_segment_ids=None,
        encoder_positions=None,
        decoder_segment_ids=None,
        decoder_positions=None,
    ):
        return super().__call__(source, target)


@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        (_WithLogits(CONFIG), None, "returned .* instead of the factors of its logits"),
        (_WithoutOption(CONFIG), None, "_WithoutOption has no argument `project`"),
        (CONFIG, {"params": {"params": {}}}, 'entry "params"'),
        (
            dataclasses.replace(CONFIG, tie_embeddings="none"),
            dataclasses.replace(CONFIG, tie_embeddings="all"),
            "output/kernel and 1 others are missing",
        ),
        (
            dataclasses.replace(CONFIG, d_ff=12),
            CONFIG,
            r"feed_forward/hidden/\w+ has the shape",
        ),
    ],
)
def test_another_model_or_head_is_named(model, params, message):
    if params is None:
        params = functional.init(model, jax.random.key(0))
    elif isinstance(params, TransformerConfig):
        params = params_of(params)
    with pytest.raises(UserError, match=message):
        cross_entropy(model, params, BATCH)
