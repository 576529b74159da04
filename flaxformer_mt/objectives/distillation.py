"""Word-level knowledge distillation: a student learns the distributions of a teacher."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.errors import UserError
from flaxformer_mt.objectives.chunked import Chunk


@dataclasses.dataclass(frozen=True)
class Distillation:
    r"""Distillation's term of `objectives.cross_entropy`, for each target token.

    .. math:: \tau^2\, KL(p \| q), \quad p = \mathrm{softmax}(z_{teacher} / \tau), \quad
        q = \mathrm{softmax}(z_{student} / \tau)

    The factor :math:`\tau^2` keeps the size of the gradient independent of the temperature.

    Source: Hinton et al. 2015, section 2; of translation, Kim and Rush 2016, section 3.1, which
    writes it as a cross-entropy (the difference is the entropy of p, which has no gradient).
    """

    weight: float = 0.5
    """The weight of the term; the cross-entropy has 1 - weight."""
    temperature: float = 1.0
    """The temperature of both distributions."""
    passes: int = 1
    name: str = "distillation"

    @property
    def loss_weight(self) -> float:
        """The factor of the cross-entropy."""
        return 1 - self.weight

    def __call__(self, chunk: Chunk) -> tuple[Array, Array]:
        """Implements `chunked.Term`."""
        if chunk.teacher_logits is None:
            raise UserError(
                "distillation needs a teacher: give cross_entropy teacher=(CONFIG, PARAMS)"
            )
        log_p = self._log_probabilities(chunk.teacher_logits, chunk)
        log_q = self._log_probabilities(chunk.logits, chunk)
        p = jnp.exp(log_p)
        divergences = self.temperature**2 * jnp.sum(p * (log_p - log_q), chunk.axis)
        return divergences, self.temperature * (jnp.exp(log_q) - p)

    def _log_probabilities(self, logits: Array, chunk: Chunk) -> Array:
        logits = logits / self.temperature
        if chunk.is_class is not None:
            # A finite number, since 0 * infinity would be NaN.
            logits = jnp.where(chunk.is_class, logits, float(jnp.finfo(logits.dtype).min) / 2)
        return jax.nn.log_softmax(logits, chunk.axis)
