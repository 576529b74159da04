"""The scores of next tokens: log-probabilities after all constraints and penalties."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.decoding.search import logits_processors, phrase_constraints
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import IMPOSSIBLE, Hypotheses, SearchState, is_possible
from flaxformer_mt.decoding.search.top_k import logsumexp, top_k


class TokenScores(NamedTuple):
    """What each next token adds to a hypothesis' log-probability: logits - normalizer."""

    logits: Float[Array, "B W V"]
    """Minus infinity for a token that must not be chosen."""
    normalizer: Float[Array, "B W 1"]

    def best(self, count: int) -> tuple[Float[Array, "B W N"], Int[Array, "B W N"]]:
        """Returns log-probabilities and ids of the min(count, V) best next tokens, best first."""
        best, tokens = top_k(self.logits, count)
        return self._finite(best), tokens

    def of(self, tokens: Int[Array, "B W X"]) -> Float[Array, "B W X"]:
        """Returns the log-probabilities of tokens."""
        return self._finite(jnp.take_along_axis(self.logits, tokens, axis=2))

    def _finite(self, logits: Array) -> Array:
        gains = logits - self.normalizer
        possible = is_possible(gains) & (gains < jnp.inf)
        return jnp.where(possible, gains, IMPOSSIBLE)  # NaN becomes IMPOSSIBLE as well.


def token_scores(
    logits: Float[Array, "B W V"],
    beam: SearchState,
    options: SearchOptions,
    earlier_groups: Sequence[Hypotheses] = (),
) -> TokenScores:
    """Applies all constraints and penalties to the logits of the next token.

    They are applied in the order of transformers' logits processors. (Forbidden tokens come first:
    no other rule depends on them.) `earlier_groups`, of a diverse beam search, are already extended
    by one token.
    """
    constraints, positions, tokens = beam.constraints, beam.positions, beam.hypotheses.tokens
    logits = logits.astype(jnp.float32)
    scores = logits
    if constraints.allowed is not None:
        scores = jnp.where(constraints.allowed[:, None], scores, -jnp.inf)
    forbidden = scores[..., np.array(options.forbidden_ids, int)]
    scores = logits_processors.forbid(scores, options.forbidden_ids)
    compete = not options.independent or constraints.has_phrases
    if options.scores or compete or options.sampling:
        # Forbidden tokens count in the sum. Adding them separately avoids writing the whole array
        # twice, with and without them.
        normalizer = jnp.logaddexp(
            logsumexp(scores), jax.nn.logsumexp(forbidden, axis=-1, keepdims=True)
        )
    else:
        normalizer = jnp.zeros((*scores.shape[:2], 1), jnp.float32)
    if earlier_groups:
        earlier = jax.tree.map(lambda *groups: jnp.concatenate(groups, axis=1), *earlier_groups)
        continued = is_possible(earlier.log_probabilities)
        scores = logits_processors.penalize_chosen(
            scores, earlier.last, continued, options.diversity_penalty
        )
    if options.repetition_penalty is not None:
        # The formula depends on the origin: log-probabilities in a beam search, otherwise logits.
        origin = jnp.zeros_like(normalizer) if options.independent else normalizer
        scores = origin + logits_processors.penalize_repetition(
            scores - origin, tokens, positions, options.repetition_penalty, options.bos_id
        )
    if options.no_repeat_ngram_size:
        scores = logits_processors.forbid_repeated_ngrams(
            scores, tokens, positions, options.no_repeat_ngram_size
        )
    if options.bad_phrases:
        scores = logits_processors.forbid_phrases(scores, tokens, positions, options.bad_phrases)
    if options.min_length:
        scores = logits_processors.forbid_early_end(
            scores, positions, constraints.min_lengths, options.eos_id
        )
    if constraints.has_phrases:
        scores = phrase_constraints.forbid_end_before_phrases(
            scores, tokens, positions, constraints.phrases, options.eos_id
        )
    if constraints.prefix.shape[1]:
        certain = None if constraints.certain is None else (normalizer, constraints.certain)
        scores = logits_processors.require_prefix(
            scores, logits, positions, constraints.prefix, certain
        )
    if options.force_end:
        scores = logits_processors.require_end(
            scores, normalizer, positions, constraints.max_lengths, options.eos_id
        )
    if options.renormalize:
        normalizer = logsumexp(scores)
    return TokenScores(scores, normalizer)
