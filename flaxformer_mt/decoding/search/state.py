"""The values that a search takes, carries from step to step and returns.

Shapes: B batch rows (one sentence each), W hypotheses per row, P the longest hypothesis, S source
tokens, V vocabulary, N returned hypotheses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

StepState = Any
"""A pytree that the step function carries along, such as the model's key/value cache."""

IMPOSSIBLE = -1e30
"""The log-probability of a hypothesis that must not be chosen. It is finite, so that sums and
quotients of it stay ordered and never become NaN."""


class StepOutput(NamedTuple):
    """What a step function returns about the next token."""

    logits: Float[Array, "B W V"]
    attention: Float[Array, "B W S"] | None = None
    """Attention to each source token; only needed for the coverage penalty."""


StepFunction = Callable[[Array, StepState, Array], tuple[StepOutput, StepState]]
"""step(tokens int32 [B, W], state, positions int32 [B]) -> (output, state): the logits of the next
token. `tokens` are the last token of each hypothesis, initially `bos_id`; `positions` are the
numbers of tokens that the hypotheses of each row have."""

ReorderFunction = Callable[[StepState, Array], StepState]
"""reorder(state, parents int32 [B, W]): the state in which hypothesis w of row b continues the
former hypothesis parents[b, w]."""


class SentenceConstraints(NamedTuple):
    """The constraints and inputs of each row's search."""

    max_lengths: Int[Array, "B"]
    """Most tokens of a hypothesis, end token included; one that reaches it without an end token is
    complete as it is. 0 marks a row without a sentence."""
    min_lengths: Int[Array, "B"]
    """Fewest tokens, end token excluded."""
    prefix: Int[Array, "B Q"]
    """First tokens of every hypothesis, padded with -1; they count as all others."""
    keys: UInt32[Array, "B 2"]
    """Threefry keys for sampling."""
    phrases: Int[Array, "B C M"]
    """Token sequences that must appear, padded with -1."""
    source_mask: Bool[Array, "B S"] | None = None
    """True = a source token; only needed for the coverage penalty."""
    allowed: Bool[Array, "B V"] | None = None
    """The tokens that may be chosen, over which probabilities are normalized; None = all."""
    certain: Int[Array, "B"] | None = None
    """How many of the prefix' first tokens have probability 1, such as a language; None = 0."""

    @property
    def has_phrases(self) -> bool:
        """Whether there is room for phrases."""
        return self.phrases.shape[1] > 0


def unconstrained(max_lengths: Int[Array, "B"]) -> SentenceConstraints:
    """Returns the constraints of rows that only have a maximum length."""
    batch_size = max_lengths.shape[0]
    return SentenceConstraints(
        max_lengths=max_lengths,
        min_lengths=jnp.zeros_like(max_lengths),
        prefix=jnp.zeros((batch_size, 0), jnp.int32),
        keys=jnp.zeros((batch_size, 2), jnp.uint32),
        phrases=jnp.zeros((batch_size, 0, 0), jnp.int32),
    )


class Hypotheses(NamedTuple):
    """Unfinished hypotheses, C per row: W, or more while the best W are not yet chosen."""

    tokens: Int[Array, "B C P"]
    """Only as many as the row's position are defined."""
    last: Int[Array, "B C"]
    """Initially `bos_id`."""
    log_probabilities: Float[Array, "B C"]
    """IMPOSSIBLE if the hypothesis is not continued."""
    coverage: Float[Array, "B C S"] | None
    """Attention that each source token has received, 1 for padding; only for its penalty."""


class SearchResult(NamedTuple):
    """The N best hypotheses of each row, best first.

    An entry without a hypothesis (a row without a sentence, fewer than N possible hypotheses, or
    logits that are not finite) has length 0 and the score `IMPOSSIBLE`.
    """

    tokens: Int[Array, "B N P"]
    """End token included, padded with `pad_id`."""
    lengths: Int[Array, "B N"]
    scores: Float[Array, "B N"]
    """The ranking score: log-probability / length penalty + coverage penalty."""
    log_probabilities: Float[Array, "B N"]
    """With all rules applied: a required end has probability 1, and repetition and diversity
    penalties are included; temperature and the filters of sampling are not."""


class SearchState(NamedTuple):
    """A search that can be continued. All arrays except those of `state` have B as first axis."""

    constraints: SentenceConstraints
    positions: Int[Array, "B"]
    """Number of tokens of every unfinished hypothesis."""
    hypotheses: Hypotheses
    finished: SearchResult
    """The W best complete hypotheses so far; with beam groups, those of each group."""
    state: StepState
    """State of the step function."""


def gather_hypotheses(tree: Any, indices: Array) -> Any:
    """Gathers hypotheses in every array [B, W, ...] of a pytree, by index [B, W']."""

    def gather(leaf: Array) -> Array:
        index = indices.reshape(indices.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return jax.tree.map(gather, tree)


def append_tokens(
    hypotheses: Hypotheses, tokens: Array, log_probabilities: Array, positions: Array
) -> Hypotheses:
    """Appends one token [B, C] to each hypothesis, and replaces the log-probabilities [B, C]."""
    is_position = jnp.arange(hypotheses.tokens.shape[2]) == positions[:, None, None]
    return hypotheses._replace(
        tokens=jnp.where(is_position, tokens[:, :, None], hypotheses.tokens),
        last=tokens,
        log_probabilities=jnp.where(is_possible(log_probabilities), log_probabilities, IMPOSSIBLE),
    )


def drop(hypotheses: Hypotheses, dropped: Array) -> Hypotheses:
    """Marks the hypotheses where `dropped` bool [B, C] is true as not to be continued."""
    kept = jnp.where(dropped, IMPOSSIBLE, hypotheses.log_probabilities)
    return hypotheses._replace(log_probabilities=kept)


def is_possible(log_probabilities: Array) -> Array:
    """Whether each log-probability is that of a hypothesis that may be chosen."""
    # Sums with IMPOSSIBLE stay far below any real log-probability.
    return log_probabilities > IMPOSSIBLE / 2
