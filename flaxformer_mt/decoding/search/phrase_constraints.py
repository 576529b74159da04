"""Phrases that must appear in a translation: beam search with dynamic beam allocation.

A beam that only follows the best continuations would never reach a phrase that the model considers
improbable. Every hypothesis is therefore also continued with the next token of each phrase that it
lacks, and hypotheses compete only with those that contain the same number of phrase tokens, their
bank. A hypothesis may end when it contains all phrases. If the maximum length or another rule makes
that impossible, the results are those that lack the fewest phrases.

A phrase may appear anywhere, the prefix included; a phrase that is given k times must appear k
times. Phrases may overlap: "a b c" contains both "a b" and "b c". A partial match counts for the
bank until the next token breaks it: "a x" contains no token of "a b".

The first `lengths` tokens of a hypothesis are defined. Phrases are padded with -1; a row without
phrases has one bank, which is an ordinary beam.

Source: Post and Vilar 2018; Hu et al. 2019, section 3.3, for the round-robin allocation.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

Phrases = Int[Array, "B C M"]


class PhraseProgress(NamedTuple):
    """How much of each phrase each hypothesis contains."""

    lacking: Bool[Array, "B W C"]
    """Whether the phrase must still appear."""
    matched: Int[Array, "B W C"]
    """Length of the longest proper prefix of the phrase that the hypothesis ends
    with."""


def phrase_progress(
    tokens: Int[Array, "B W P"], lengths: Int[Array, "B _"], phrases: Phrases
) -> PhraseProgress:
    """Searches the hypotheses for the phrases."""
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


def banks(progress: PhraseProgress, phrases: Phrases) -> Int[Array, "B W"]:
    """Returns the number of phrase tokens that each hypothesis contains.

    Of partially matched phrases, only the longest match counts.
    """
    sizes = (phrases >= 0).sum(axis=-1)[:, None]
    complete = jnp.where(progress.lacking, 0, sizes).sum(axis=-1)
    return complete + jnp.where(progress.lacking, progress.matched, 0).max(axis=-1)


def next_tokens(progress: PhraseProgress, phrases: Phrases) -> Int[Array, "B W C"]:
    """Returns the tokens that start or continue the phrases that a hypothesis lacks, else -1."""
    tokens = jnp.take_along_axis(phrases[:, None], progress.matched[..., None], axis=3)[..., 0]
    return jnp.where(progress.lacking, tokens, -1)


def forbid_end_before_phrases(
    scores: Float[Array, "B W V"],
    tokens: Int[Array, "B W P"],
    positions: Int[Array, "B"],
    phrases: Phrases,
    eos_id: int,
) -> Float[Array, "B W V"]:
    """Forbids the end token for hypotheses that lack a phrase."""
    lacking = phrase_progress(tokens, positions[:, None], phrases).lacking.any(axis=-1)
    return scores.at[..., eos_id].add(jnp.where(lacking, -jnp.inf, 0.0))


def only_new(required: Int[Array, "B W C"], tokens: Int[Array, "B W X"]) -> Int[Array, "B W C"]:
    """Replaces duplicates in `required`, and elements that `tokens` has, by -1."""
    known = (required[..., None] == tokens[:, :, None]).any(axis=-1)
    earlier = jnp.tri(required.shape[2], k=-1, dtype=bool)
    repeated = ((required[..., None] == required[:, :, None]) & earlier).any(axis=-1)
    return jnp.where(known | repeated, -1, required)


def round_robin(banks: Int[Array, "B C"], scores: Float[Array, "B C"]) -> Int[Array, "B C"]:
    """Returns the indices of the candidates in the order in which they enter the beam.

    The best candidate of each bank comes first, starting with the bank of most phrase tokens, then
    the second best of each bank, and so on; of equal scores the earlier comes first. Entries of
    bank -1, which are not candidates, come last.
    """
    indices = jnp.broadcast_to(jnp.arange(banks.shape[1]), banks.shape)
    descending, _, order = lax.sort((-banks, -scores, indices), num_keys=2)
    first_of_bank = jnp.diff(descending, axis=1, prepend=descending[:, :1] - 1) != 0
    turns = indices - lax.cummax(jnp.where(first_of_bank, indices, 0), axis=1)
    turns = jnp.where(descending > 0, banks.shape[1], turns)
    return lax.sort((turns, order), num_keys=1)[1]


def _required_counts(phrases: Phrases) -> Int[Array, "B C"]:
    """How often each phrase must appear: its ordinal among equal phrases."""
    equal = (phrases[:, :, None] == phrases[:, None]).all(axis=-1)  # [B, C, C]
    count = (equal & jnp.tri(phrases.shape[1], dtype=bool)).sum(axis=-1)
    return jnp.where(phrases[:, :, 0] >= 0, count, 0)
