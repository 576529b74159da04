"""Ensembles: the next-token distributions of several models, averaged."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.decoding.search.state import ReorderFunction, StepFunction, StepOutput, StepState
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.runs.trained_model import TrainedModel


def combine(steps: Sequence[StepFunction], how: Literal["log", "probability"]) -> StepFunction:
    r"""Returns the step function of an ensemble of M models with equal weights.

    .. math::
        \text{log:}\ \frac{1}{M} \sum_m \log p_m(v) \qquad
        \text{probability:}\ \log \frac{1}{M} \sum_m p_m(v)

    "log" is a geometric mean, whose probabilities sum to less than 1 until the search normalizes
    them. A token to which one model gives a logit of minus infinity is impossible with "log", and
    with "probability" only if all models do. The attention is averaged over the models, which may
    differ in everything but their vocabularies.

    The state of the step function is a tuple of the models' states. Its logits are the logarithms
    above, in float32 or wider; those of a single model are returned unchanged.
    """

    def step(tokens: Array, states: StepState, positions: Array) -> tuple[StepOutput, StepState]:
        outputs, new_states = zip(
            *(
                single(tokens, state, positions)
                for single, state in zip(steps, states, strict=True)
            ),
            strict=True,
        )
        if len(outputs) == 1:
            return outputs[0], new_states
        attentions = [output.attention for output in outputs if output.attention is not None]
        return (
            StepOutput(
                mean_log_probabilities([output.logits for output in outputs], how),
                jnp.mean(_stack(attentions), axis=0) if attentions else None,
            ),
            new_states,
        )

    return step


def reorder_each(reorder: ReorderFunction) -> ReorderFunction:
    """Returns a function that applies `reorder` to every state of a tuple."""
    return lambda states, parents: tuple(reorder(state, parents) for state in states)


def mean_log_probabilities(logits: Sequence[Array], how: Literal["log", "probability"]) -> Array:
    """Averages the distributions of M models, logits [..., V] each; see `combine`."""
    log_probabilities = jax.nn.log_softmax(_stack(logits))
    if how == "log":
        return jnp.mean(log_probabilities, axis=0)
    return jax.nn.logsumexp(log_probabilities, axis=0) - math.log(len(logits))


def _stack(arrays: Sequence[Array]) -> Array:
    return jnp.stack([array.astype(at_least_float32(array.dtype)) for array in arrays])


def require_same_vocabularies(runs: Sequence[tuple[str, TrainedModel]]) -> None:
    """Raises UserError if vocabularies, special tokens or numbers of logits of two runs differ.

    Args:
      runs: (folder, run) of each model.
    """
    first_folder, first = runs[0]
    for folder, run in runs[1:]:
        for side in ("source", "target"):
            fingerprints = {getattr(r.tokenizers, side).fingerprint for r in (first, run)}
            if len(fingerprints) > 1:
                raise UserError(
                    f"{first_folder} and {folder} cannot form an ensemble: their {side} "
                    "vocabularies differ; train one with data.tokenizer_path set to the other"
                )
        for name in ("pad_id", "bos_id", "eos_id", "target_vocab_size"):
            ours, theirs = (getattr(r.model, name) for r in (first, run))
            if ours != theirs:
                raise UserError(
                    f"{first_folder} and {folder} cannot form an ensemble: model.{name} is "
                    f"{ours} in one and {theirs} in the other"
                )
