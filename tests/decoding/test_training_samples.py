"""Samples that are drawn inside a training step."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import flaxformer_mt as fmt
from flaxformer_mt.data.stream.placement import place_batch
from flaxformer_mt.errors import UserError

CONFIG = fmt.TransformerConfig(
    source_vocab_size=7,
    target_vocab_size=7,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.5,  # Samples are drawn without.
)
END, START, PAD = CONFIG.eos_id, CONFIG.bos_id, CONFIG.pad_id
PARAMS = jax.tree.map(lambda leaf: leaf * 2, fmt.init(CONFIG, jax.random.key(1)))
SOURCE = jnp.array([[5, 6, END, PAD], [4, END, PAD, PAD], [6, 4, 5, END]])
KEY = jax.random.key(0)


def batch_of(sources, segment_ids=None, positions=None):
    """Returns a batch of sources without targets."""
    tokens = np.asarray(sources, np.int32)
    ids = (tokens != PAD).astype(np.int32) if segment_ids is None else np.array(segment_ids)
    places = ids * np.arange(tokens.shape[1], dtype=np.int32) if positions is None else positions
    empty = np.zeros_like(tokens)
    return fmt.Batch(
        encoder_input_tokens=tokens,
        encoder_segment_ids=ids,
        encoder_positions=places,
        decoder_input_tokens=empty,
        decoder_target_tokens=empty,
        decoder_loss_weights=empty.astype(np.float32),
        decoder_segment_ids=empty,
        decoder_positions=empty,
    )


logits_of = jax.jit(functools.partial(fmt.apply, CONFIG))
compiled_sample = jax.jit(
    functools.partial(fmt.sample, CONFIG),
    static_argnums=3,
    static_argnames=("max_length", "temperature", "top_k", "unpacked"),
)


def log_probabilities(params, batch):
    """Returns those of the targets of a batch, by teacher forcing: [rows]."""
    log_p = jax.nn.log_softmax(fmt.apply(CONFIG, params, batch))
    of_tokens = jnp.take_along_axis(log_p, batch.decoder_target_tokens[..., None], -1)[..., 0]
    return jnp.sum(of_tokens * batch.decoder_loss_weights, axis=-1)


def exact_distribution(source, length, temperature):
    """Returns the probability of each translation of at most `length` tokens."""
    allowed = [token for token in range(7) if token not in (PAD, START)]
    found = {}

    def next_tokens(prefix):
        inputs = jnp.array([[START, *prefix, *[PAD] * (length - 1 - len(prefix))]])
        batch = {"encoder_input_tokens": source[None], "decoder_input_tokens": inputs}
        logits = logits_of(PARAMS, batch)[0, len(prefix), jnp.array(allowed)]
        return zip(allowed, jax.nn.softmax(logits / temperature).tolist(), strict=True)

    def grow(prefix, probability):
        for token, share in next_tokens(prefix):
            tokens = (*prefix, token)
            if token == END or len(tokens) == length:
                found[tokens] = probability * share
            else:
                grow(tokens, probability * share)

    grow((), 1.0)
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_are_distributed_as_the_model_says(temperature):
    n = 3000
    samples = compiled_sample(PARAMS, SOURCE, KEY, n, max_length=2, temperature=temperature)
    for row in range(len(SOURCE)):
        drawn = collections.Counter(
            tuple(tokens[: int(count)].tolist())
            for tokens, count in zip(
                np.asarray(samples.tokens[row]), samples.weights[row].sum(-1), strict=True
            )
        )
        expected = exact_distribution(SOURCE[row], 2, temperature)
        assert math.isclose(sum(expected.values()), 1, rel_tol=1e-4)
        assert set(drawn) <= set(expected)
        frequent = {tokens: n * p for tokens, p in expected.items() if n * p >= 5}
        rest = n - sum(frequent.values())
        counts = [drawn[tokens] for tokens in frequent]
        observed, wanted = [*counts, n - sum(counts)], [*frequent.values(), rest]
        if rest < 5:
            observed, wanted = counts, np.array(counts).sum() / (n - rest) * np.array(wanted[:-1])
        assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-3


def test_log_probabilities_are_those_of_teacher_forcing():
    batch = batch_of(SOURCE)
    samples = fmt.sample(CONFIG, PARAMS, batch, KEY, 5, temperature=1.5)
    rows = samples.rows(batch)
    expected = log_probabilities(PARAMS, rows).reshape(3, 5)
    np.testing.assert_allclose(samples.log_probabilities, expected, rtol=1e-5, atol=1e-5)
    assert (np.diff(samples.log_probabilities) <= 0).all()  # The most probable first.
    np.testing.assert_array_equal(rows.encoder_input_tokens[5:10], np.repeat(SOURCE[1:2], 5, 0))
    np.testing.assert_array_equal(rows.decoder_input_tokens[:, 0], START)
    np.testing.assert_array_equal(
        rows.decoder_input_tokens[:, 1:], rows.decoder_target_tokens[:, :-1]
    )


def test_number_and_maximum_length():
    samples = fmt.sample(CONFIG, PARAMS, SOURCE, KEY, 4)
    assert samples.tokens.shape == (3, 4, int(1.5 * 3) + 20)
    lengths = np.asarray(samples.weights.sum(-1))
    sources = np.array([2, 1, 3])  # The end token does not count.
    assert (lengths <= (1.5 * sources).astype(int)[:, None] + 20).all()
    samples = fmt.sample(CONFIG, PARAMS, SOURCE, KEY, 6, max_length=3)
    assert samples.tokens.shape == samples.input_tokens.shape == (3, 6, 3)
    for tokens, weights in zip(
        np.asarray(samples.tokens).reshape(-1, 3), samples.weights.reshape(-1, 3), strict=True
    ):
        count = int(weights.sum())
        assert weights.tolist() == [1.0] * count + [0.0] * (3 - count)
        assert count == 3 or tokens[count - 1] == END
        assert END not in tokens[: count - 1]
        assert not {PAD, START} & set(tokens[:count].tolist())
    only_best = fmt.sample(CONFIG, PARAMS, SOURCE, KEY, 6, max_length=3, top_k=1)
    assert (only_best.tokens == only_best.tokens[:, :1]).all()


def test_a_compiled_sample_is_the_same():
    expected = fmt.sample(CONFIG, PARAMS, SOURCE, KEY, 4)
    compiled = compiled_sample(PARAMS, SOURCE, KEY, 4)
    np.testing.assert_array_equal(compiled.tokens, expected.tokens)
    np.testing.assert_allclose(compiled.log_probabilities, expected.log_probabilities, rtol=1e-5)


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_samples_in_a_step_on_a_mesh_are_those_of_one_device(axes):
    sources = np.tile(np.asarray(SOURCE), (3, 1))[:8]
    batch, optimizer = batch_of(sources), optax.sgd(0.1)

    def update(state, batch, key, frozen):
        samples = fmt.sample(CONFIG, state["params"], batch, key, 3, max_length=6, unpacked=True)
        rows = samples.rows(batch)
        value, gradient = jax.value_and_grad(
            lambda params: -jnp.mean(log_probabilities(params, rows))
        )(state["params"])
        updates, _ = optimizer.update(gradient, optimizer.init(state["params"]))
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "step": state["step"] + 1}, (samples, value)

    mesh = fmt.make_mesh(**axes)
    state = fmt.place({"params": PARAMS, "step": jnp.int32(0)}, mesh)
    step = fmt.compile_step(update, mesh, seed=0)
    state, (samples, value) = step(state, place_batch(batch, mesh))
    key = jax.random.fold_in(jax.random.key(0), 0)
    expected = fmt.sample(CONFIG, PARAMS, batch, key, 3, max_length=6)
    np.testing.assert_array_equal(samples.tokens, expected.tokens)
    np.testing.assert_allclose(value, -expected.log_probabilities.mean(), rtol=1e-5)
    assert int(state["step"]) == 1
    before, after = PARAMS["target_embedding"], state["params"]["target_embedding"]
    assert (np.asarray(before["embedding"]) != np.asarray(after["embedding"])).any(axis=-1).all()


PACKED = np.array([[5, 6, END, 4, END, PAD], [4, END, PAD, PAD, PAD, PAD]])
OF_PACKED = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    "source",
    [batch_of(PACKED, OF_PACKED), jnp.array(PACKED)[::-1]],
    ids=["segment ids", "two end tokens"],
)
def test_packed_rows_are_refused(source):
    with pytest.raises(UserError, match=r"row [01] of the batch has several sentences"):
        fmt.sample(CONFIG, PARAMS, source, KEY, 2)


def test_a_traced_batch_with_segment_ids_must_be_said_to_be_unpacked():
    with pytest.raises(UserError, match="unpacked=True"):
        compiled_sample(PARAMS, batch_of(SOURCE), KEY, 2)
    samples = compiled_sample(PARAMS, batch_of(SOURCE), KEY, 2, unpacked=True)
    assert np.isfinite(samples.log_probabilities).all()
    # A wrong statement is not silent.
    samples = compiled_sample(PARAMS, batch_of(PACKED, OF_PACKED), KEY, 2, unpacked=True)
    assert np.isnan(samples.log_probabilities).all(axis=1).tolist() == [True, False]
    assert np.isnan(samples.weights).all(axis=(1, 2)).tolist() == [True, False]


def test_a_row_of_padding_has_no_samples():
    sources = np.concatenate([np.asarray(SOURCE), np.zeros((1, 4), np.int32)])
    samples = fmt.sample(CONFIG, PARAMS, batch_of(sources), KEY, 2)
    counts = np.asarray(samples.weights.sum(-1))
    assert counts[-1].tolist() == [0, 0]
    assert (counts[:-1] > 0).all()


def test_models_without_an_encoder_and_options_out_of_range():
    language_model = fmt.TransformerConfig(target_vocab_size=7, has_inputs=False)
    with pytest.raises(UserError, match="language model"):
        fmt.sample(language_model, {}, SOURCE, KEY, 2)
    for options in ({"temperature": 0.0}, {"top_p": 2.0}, {"max_length": -1}):
        with pytest.raises(UserError, match=next(iter(options))):
            fmt.sample(CONFIG, PARAMS, SOURCE, KEY, 2, **options)
