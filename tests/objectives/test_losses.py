"""Label smoothing: every published convention, to the last digits, and its corner cases."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from absl.testing import parameterized

from flaxformer_mt.objectives.losses import (
    accuracy,
    label_smoothed_cross_entropy,
    token_losses,
)
from flaxformer_mt.parity.references.losses import LOSSES

PAD = 3
CONVENTIONS = {
    "jadore801120": "others",
    "annotated": "non_pad_kl",
    "annotated_wide_heads": "non_pad_kl",
    "tunz": "others_kl",
    "torch": "uniform",
    "fairseq": "others",
}


def example(dtype, padded=True):
    """Logits [2, 5, 11] far from 0, targets with padding among them, weights that leave it out."""
    random = np.random.default_rng(0)
    logits = (random.normal(size=(2, 5, 11)) * 3 + 20).astype(dtype)
    targets = np.array([[4, 1, 0, 10, 5], [7, 2, 9, 5, 6]], np.int32)
    if padded:
        targets[0, 3:] = targets[1, 4] = PAD
    return logits, targets, (targets != PAD).astype(np.float32)


class LossesTest(chex.TestCase):
    @chex.variants(with_jit=True)
    @parameterized.product(family=list(CONVENTIONS), dtype=["float32", "float64"])
    def test_equals_the_published_loss_and_its_gradient(self, family, dtype, smoothing=0.1):
        # `annotated_wide_heads` also counts padding, as an ordinary class; all others leave it out.
        logits, targets, weights = example(dtype, padded=family != "annotated_wide_heads")
        tensor = torch.tensor(logits, requires_grad=True)
        loss, tokens = LOSSES[family](
            tensor.flatten(0, 1), torch.tensor(targets).long().flatten(), smoothing, PAD
        )
        loss.backward()

        with jax.enable_x64(dtype == "float64"):

            def ours(logits):
                return label_smoothed_cross_entropy(
                    logits, targets, weights, smoothing, CONVENTIONS[family], PAD
                )

            (total, weight), gradient = self.variant(jax.value_and_grad(ours, has_aux=True))(logits)
            assert total.dtype == weight.dtype == dtype
            tolerance = 1e-12 if dtype == "float64" else 1e-5
            np.testing.assert_allclose(total, loss.item(), rtol=tolerance)
            assert weight == tokens.item()
            chex.assert_trees_all_close(gradient, tensor.grad.numpy(), atol=tolerance)

    @chex.variants(with_jit=True, without_jit=True)
    def test_no_smoothing_is_the_same_in_every_convention(self):
        logits, targets, weights = example("float32")
        expected = -jnp.sum(
            jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
            * weights
        )
        for convention in set(CONVENTIONS.values()):
            loss = self.variant(
                lambda x, c=convention: label_smoothed_cross_entropy(
                    x, targets, weights, 0.0, c, PAD
                )
            )(logits)
            np.testing.assert_allclose(loss[0], expected, rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_accuracy_counts_weights(self):
        logits = jnp.array([[[1.0, 3.0, 2.0], [5.0, 0.0, 0.0], [0.0, 0.0, 9.0]]])
        correct, weight = self.variant(accuracy)(
            logits, jnp.array([[1, 1, 2]]), jnp.array([[1.0, 1.0, 0.5]])
        )
        assert (correct, weight) == (1.5, 2.5)


def test_a_perfect_model_has_no_divergence():
    """Less the entropy, the loss of the smoothed label itself is 0."""
    targets = np.array([[1, 2]], np.int32)
    label = np.full((1, 2, 6), 0.1 / 5, np.float32)
    label[0, [0, 1], targets[0]] = 0.9
    losses = token_losses(jnp.log(label), targets, 0.1, "others_kl")
    np.testing.assert_allclose(losses, 0, atol=1e-6)


def test_padding_gets_no_probability_and_no_loss():
    """In `non_pad_kl` the padding class may have any logit, and padding as target costs nothing."""
    logits, targets, _ = example("float32")

    def gradient_of_padding(convention):
        total = jax.grad(lambda x: token_losses(x, targets, 0.1, convention, PAD).sum())
        # At a probability of 0 the gradient is less the label's probability.
        return total(jnp.asarray(logits).at[..., PAD].set(-80.0))[..., PAD]

    chex.assert_trees_all_close(gradient_of_padding("non_pad_kl"), jnp.zeros_like(targets, float))
    others = gradient_of_padding("others")[targets != PAD]
    np.testing.assert_allclose(others, -0.1 / 10, rtol=1e-5)
    assert not np.any(token_losses(logits, targets, 0.1, "non_pad_kl", PAD)[targets == PAD])


@pytest.mark.slow_except("fairseq")
@pytest.mark.parametrize("family", LOSSES)
def test_without_padding_every_class_counts(family):
    logits, targets, _ = example("float32", padded=False)
    logits, targets = jnp.asarray(logits[:1]), targets[:1]  # With the last class as a target.
    expected, _ = LOSSES[family](
        torch.tensor(np.array(logits[0])), torch.tensor(targets[0]).long(), 0.1, -1
    )
    options = 0.1, CONVENTIONS[family], -1
    np.testing.assert_allclose(token_losses(logits, targets, *options).sum(), expected, rtol=1e-5)

    gradient = jax.jit(jax.grad(lambda x: token_losses(x, targets, *options).sum()))(logits)
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-5)  # Labels sum to 1.


def test_impossible_classes_do_no_harm_without_smoothing():
    logits = jnp.array([[[0.0, -jnp.inf, 1.0]]])
    loss = token_losses(logits, jnp.array([[2]]))
    np.testing.assert_allclose(loss, np.log1p(np.exp(-1)), rtol=1e-6)


def test_the_loss_does_not_depend_on_an_offset_of_the_logits():
    logits, targets, weights = example("float32")
    near = label_smoothed_cross_entropy(jnp.asarray(logits), targets, weights, 0.1)
    far = label_smoothed_cross_entropy(jnp.asarray(logits) + 1000, targets, weights, 0.1)
    chex.assert_trees_all_close(near, far, rtol=1e-3)
