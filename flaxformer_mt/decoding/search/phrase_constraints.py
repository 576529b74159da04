"""Phrases that must appear in a translation: dynamic beam allocation.

A beam that only follows the best continuations would never get to a phrase that the model finds
improbable. So every hypothesis is also continued by the next token of each phrase that it lacks,
and hypotheses compete for places in the beam only with those that have as many tokens of phrases as
they: their bank. A hypothesis may end when it has all phrases. If the length leaves no room for
that, or other rules forbid a phrase, the results are those that lack the fewest phrases.

Which phrases a hypothesis has is read from its tokens. A phrase is there if its tokens follow each
other anywhere, the forced prefix included; a phrase that is asked for k times must be there k
times. Phrases may share tokens: "a b c" has both "a b" and "b c". What has been begun counts for
the bank until a token that does not fit: "a x" has nothing of "a b".

Hypotheses' tokens are int32 [B, W, P], of which the first `lengths` int32 [B, 1] or [B, W] count;
phrases are int32 [B, C, M], filled with -1. A row without phrases has one bank, and so an ordinary
beam.

Source: Post and Vilar 2018; Hu et al. 2019, section 3.3, for the places taken in turns.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Progress(NamedTuple):
    """How far each hypothesis is with each phrase."""

    lacking: Array
    """bool [B, W, C], whether the phrase must still appear."""
    begun: Array
    """int32 [B, W, C], the most tokens at the end of the hypothesis that are the beginning of the
    phrase, but not all of it."""


def progress(tokens: Array, lengths: Array, phrases: Array) -> Progress:
    """Looks for the phrases in the hypotheses; see the top of this file."""
    sizes = (phrases >= 0).sum(axis=-1)[:, None]  # [B, 1, C]
    places = jnp.arange(tokens.shape[2])
    # matches[b, w, c, p]: the first m tokens of the phrase stand at p, for one m after the other.
    matches = jnp.ones((*tokens.shape[:2], phrases.shape[1], tokens.shape[2]), bool)
    begun = jnp.zeros(matches.shape[:3], jnp.int32)
    found = jnp.zeros(matches.shape[:3], jnp.int32)
    for size in range(1, phrases.shape[2] + 1):
        next_tokens = jnp.roll(tokens, 1 - size, axis=2)[:, :, None]
        matches = matches & (next_tokens == phrases[:, None, :, size - 1, None])
        ends = places + size
        inside = matches & (ends <= lengths[:, :, None, None])
        found = found + jnp.where(sizes == size, inside.sum(axis=-1), 0)
        at_end = (inside & (ends == lengths[:, :, None, None])).any(axis=-1)
        begun = jnp.where(at_end & (size < sizes), size, begun)
    return Progress(found < _times(phrases)[:, None], begun)


def banks(hypotheses: Progress, phrases: Array) -> Array:
    """How many tokens of phrases each hypothesis has, int32 [B, W].

    Of the phrases that are begun the one that is farthest counts.
    """
    sizes = (phrases >= 0).sum(axis=-1)[:, None]
    complete = jnp.where(hypotheses.lacking, 0, sizes).sum(axis=-1)
    return complete + jnp.where(hypotheses.lacking, hypotheses.begun, 0).max(axis=-1)


def next_tokens(hypotheses: Progress, phrases: Array) -> Array:
    """The tokens that continue, or begin, the phrases that a hypothesis lacks.

    Returns:
      int32 [B, W, C]; -1 where the phrase is complete.
    """
    wanted = jnp.take_along_axis(phrases[:, None], hypotheses.begun[..., None], axis=3)[..., 0]
    return jnp.where(hypotheses.lacking, wanted, -1)


def forbid_early_end(
    scores: Array, tokens: Array, positions: Array, phrases: Array, eos_id: int
) -> Array:
    """Rules out the end token, in scores [B, W, V], for hypotheses that lack a phrase."""
    lacking = progress(tokens, positions[:, None], phrases).lacking.any(axis=-1)
    return scores.at[..., eos_id].add(jnp.where(lacking, -jnp.inf, 0.0))


def only_new(wanted: Array, tokens: Array) -> Array:
    """`wanted` int32 [B, W, C], with -1 for what is in `tokens` int32 [B, W, X] or twice in it."""
    known = (wanted[..., None] == tokens[:, :, None]).any(axis=-1)
    earlier = jnp.tri(wanted.shape[2], k=-1, dtype=bool)
    repeated = ((wanted[..., None] == wanted[:, :, None]) & earlier).any(axis=-1)
    return jnp.where(known | repeated, -1, wanted)


def in_turns(banks: Array, scores: Array) -> Array:
    """The order in which candidates get places in the beam.

    First comes the best of every bank, those with most tokens of phrases at the head, then the
    second best of every bank, and so on.

    Args:
      banks: int32 [B, K]; -1 for what is no candidate and comes last.
      scores: float32 [B, K]; of equal ones the earlier comes first.

    Returns:
      int32 [B, K], indices of the candidates.
    """
    places = jnp.broadcast_to(jnp.arange(banks.shape[1]), banks.shape)
    falling, _, index = lax.sort((-banks, -scores, places), num_keys=2)
    first_of_bank = jnp.diff(falling, axis=1, prepend=falling[:, :1] - 1) != 0
    turns = places - lax.cummax(jnp.where(first_of_bank, places, 0), axis=1)
    turns = jnp.where(falling > 0, banks.shape[1], turns)
    return lax.sort((turns, index), num_keys=1)[1]


def _times(phrases: Array) -> Array:
    """How often each phrase must appear, int32 [B, C]: once more than the equal ones before it."""
    equal = (phrases[:, :, None] == phrases[:, None]).all(axis=-1)  # [B, C, C]
    count = (equal & jnp.tri(phrases.shape[1], dtype=bool)).sum(axis=-1)
    return jnp.where(phrases[:, :, 0] >= 0, count, 0)
