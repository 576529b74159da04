"""Phrases that must appear in a translation: beam search with dynamic beam allocation.

A beam that only follows the best continuations would never reach a phrase that the model considers
improbable. Every hypothesis is therefore also continued with the next token of each phrase that it
lacks, and hypotheses compete only with those that contain the same number of phrase tokens, their
bank. A hypothesis may end when it contains all phrases. If the maximum length or another rule makes
that impossible, the results are those that lack the fewest phrases.

Which phrases a hypothesis contains is computed from its tokens. A phrase may appear anywhere, the
prefix included; a phrase that is given k times must appear k times. Phrases may overlap: "a b c"
contains both "a b" and "b c". A partial match counts for the bank until the next token breaks it:
"a x" contains no token of "a b".

The tokens of the hypotheses are int32 [B, W, P], the first `lengths` int32 [B, 1] or [B, W] of them
being defined; phrases are int32 [B, C, M], padded with -1. A row without phrases has one bank,
which is an ordinary beam.

Source: Post and Vilar 2018; Hu et al. 2019, section 3.3, for the round-robin allocation.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class PhraseProgress(NamedTuple):
    """How much of each phrase each hypothesis contains."""

    lacking: Array
    """bool [B, W, C], whether the phrase must still appear."""
    matched: Array
    """int32 [B, W, C], length of the longest proper prefix of the phrase that the hypothesis ends
    with."""


def phrase_progress(tokens: Array, lengths: Array, phrases: Array) -> PhraseProgress:
    """Searches the hypotheses for the phrases; see the module docstring for the arguments."""
    sizes = (phrases >= 0).sum(axis=-1)[:, None]  # [B, 1, C]
    positions = jnp.arange(tokens.shape[2])
    # matches[b, w, c, p]: the first `size` tokens of the phrase are at p.
    matches = jnp.ones((*tokens.shape[:2], phrases.shape[1], tokens.shape[2]), bool)
    matched = jnp.zeros(matches.shape[:3], jnp.int32)
    found = jnp.zeros(matches.shape[:3], jnp.int32)
    for size in range(1, phrases.shape[2] + 1):
        next_tokens = jnp.roll(tokens, 1 - size, axis=2)[:, :, None]
        matches = matches & (next_tokens == phrases[:, None, :, size - 1, None])
        ends = positions + size
        inside = matches & (ends <= lengths[:, :, None, None])
        found = found + jnp.where(sizes == size, inside.sum(axis=-1), 0)
        at_end = (inside & (ends == lengths[:, :, None, None])).any(axis=-1)
        matched = jnp.where(at_end & (size < sizes), size, matched)
    return PhraseProgress(found < _required_counts(phrases)[:, None], matched)


def banks(progress: PhraseProgress, phrases: Array) -> Array:
    """Returns the number of phrase tokens that each hypothesis contains, int32 [B, W].

    Of partially matched phrases, only the longest match counts.
    """
    sizes = (phrases >= 0).sum(axis=-1)[:, None]
    complete = jnp.where(progress.lacking, 0, sizes).sum(axis=-1)
    return complete + jnp.where(progress.lacking, progress.matched, 0).max(axis=-1)


def next_tokens(progress: PhraseProgress, phrases: Array) -> Array:
    """Returns the tokens that start or continue the phrases that a hypothesis lacks.

    Returns:
      int32 [B, W, C]; -1 if the phrase is complete.
    """
    tokens = jnp.take_along_axis(phrases[:, None], progress.matched[..., None], axis=3)[..., 0]
    return jnp.where(progress.lacking, tokens, -1)


def forbid_end_before_phrases(
    scores: Array, tokens: Array, positions: Array, phrases: Array, eos_id: int
) -> Array:
    """Forbids the end token, in scores [B, W, V], for hypotheses that lack a phrase."""
    lacking = phrase_progress(tokens, positions[:, None], phrases).lacking.any(axis=-1)
    return scores.at[..., eos_id].add(jnp.where(lacking, -jnp.inf, 0.0))


def only_new(required: Array, tokens: Array) -> Array:
    """Replaces duplicates, and elements of `tokens` [B, W, X], in `required` [B, W, C] by -1."""
    known = (required[..., None] == tokens[:, :, None]).any(axis=-1)
    earlier = jnp.tri(required.shape[2], k=-1, dtype=bool)
    repeated = ((required[..., None] == required[:, :, None]) & earlier).any(axis=-1)
    return jnp.where(known | repeated, -1, required)


def round_robin(banks: Array, scores: Array) -> Array:
    """Returns the order in which candidates enter the beam.

    The best candidate of each bank comes first, starting with the bank of most phrase tokens, then
    the second best of each bank, and so on.

    Args:
      banks: int32 [B, C]; -1 for entries that are no candidates, which come last.
      scores: float32 [B, C]; of equal ones the earlier comes first.

    Returns:
      int32 [B, C], indices of the candidates.
    """
    indices = jnp.broadcast_to(jnp.arange(banks.shape[1]), banks.shape)
    descending, _, order = lax.sort((-banks, -scores, indices), num_keys=2)
    first_of_bank = jnp.diff(descending, axis=1, prepend=descending[:, :1] - 1) != 0
    turns = indices - lax.cummax(jnp.where(first_of_bank, indices, 0), axis=1)
    turns = jnp.where(descending > 0, banks.shape[1], turns)
    return lax.sort((turns, order), num_keys=1)[1]


def _required_counts(phrases: Array) -> Array:
    """How often each phrase must appear, int32 [B, C]: its ordinal among equal phrases."""
    equal = (phrases[:, :, None] == phrases[:, None]).all(axis=-1)  # [B, C, C]
    count = (equal & jnp.tri(phrases.shape[1], dtype=bool)).sum(axis=-1)
    return jnp.where(phrases[:, :, 0] >= 0, count, 0)
