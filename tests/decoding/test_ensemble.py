import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.batching.search_programs import (
    combine,
    mean_log_probabilities,
    reorder_each,
)
from flaxformer_mt.decoding.search.state import StepOutput, gather_hypotheses
from flaxformer_mt.decoding.translator import require_same_vocabularies
from flaxformer_mt.errors import UserError
from flaxformer_mt.trained_model import TrainedModel

B, W, S, V = 2, 3, 4, 5
TOKENS, POSITIONS = jnp.zeros((B, W), jnp.int32), jnp.zeros(B, jnp.int32)


def random_logits(count):
    random = np.random.default_rng(0)
    return [jnp.array(random.normal(size=(B, W, V)) * 3, jnp.float32) for _ in range(count)]


def counting_step(logits, attention=None):
    """Returns a step function with constant output that counts its calls."""
    return lambda tokens, count, positions: (StepOutput(logits, attention), count + 1)


def expected_logarithms(logits, how):
    logarithms = scipy.special.log_softmax(np.array(logits, np.float64), axis=-1)
    return logarithms.mean(0) if how == "log" else np.log(np.exp(logarithms).mean(0))


@pytest.mark.parametrize("how", ["log", "probability"])
def test_models_are_averaged(how):
    logits = random_logits(3)
    step = combine([counting_step(single) for single in logits], how)
    output, counts = jax.jit(step)(TOKENS, (0, 10, 20), POSITIONS)
    np.testing.assert_allclose(output.logits, expected_logarithms(logits, how), atol=1e-5)
    assert output.attention is None
    assert counts == (1, 11, 21)


def test_a_token_excluded_by_one_model():
    first = jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf])
    second = jnp.array([0.0, -jnp.inf, 0.0, -jnp.inf])
    np.testing.assert_allclose(
        jnp.exp(mean_log_probabilities([first, second], "log")), [0.5, 0, 0, 0]
    )
    np.testing.assert_allclose(
        jnp.exp(mean_log_probabilities([first, second], "probability")), [0.5, 0.25, 0.25, 0]
    )


@pytest.mark.parametrize("how", ["log", "probability"])
def test_extreme_logits_and_models_of_different_precision(how):
    logits = [jnp.array([1e4, -1e4, 0.0]), jnp.array([1e4, 0.0, -1e4], jnp.bfloat16)]
    together = mean_log_probabilities(logits, how)
    assert together.dtype == jnp.float32
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together[0], 0, atol=1e-6)


def test_every_state_is_reordered():
    states = (jnp.arange(B * W).reshape(B, W), {"x": jnp.arange(B * W).reshape(B, W, 1)})
    parents = jnp.array([[2, 2, 0], [1, 0, 0]])
    first, second = reorder_each(gather_hypotheses)(states, parents)
    assert first.tolist() == [[2, 2, 0], [4, 3, 3]]
    assert second["x"][..., 0].tolist() == first.tolist()


def run(source="s", target="t", **model):
    vocabularies = Tokenizers(
        source=types.SimpleNamespace(fingerprint=source, vocab_size=64),
        target=types.SimpleNamespace(fingerprint=target, vocab_size=64),
    )
    config = ExperimentConfig(model=TransformerConfig(**model))
    return TrainedModel(config, {}, vocabularies, step=0)


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (run(source="x"), "source vocabularies differ"),
        (run(target="x"), "target vocabularies differ"),
        (run(eos_id=7), "model.eos_id is 2 in one and 7 in the other"),
        (
            run(target_vocab_size=128, source_vocab_size=128),
            "model.target_vocab_size is 64 in one and 128 in the other",
        ),
    ],
)
def test_different_vocabularies_are_rejected(other, cause):
    with pytest.raises(UserError, match=f"^runs/a and runs/c cannot form an ensemble: .*{cause}"):
        require_same_vocabularies([("runs/a", run()), ("runs/b", run()), ("runs/c", other)])
