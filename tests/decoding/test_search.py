"""Searches compared with a slow reference implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from slow_search import Constraints, slow_search
from toy_search import (
    EOS,
    SPECIAL,
    B,
    P,
    S,
    V,
    assert_row_is,
    batched,
    ends,
    find,
    node_of,
    numbers,
    random_world,
    seeds,
    three_constraints,
    with_numbers,
)

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.search.options import SearchOptions, forbidden_token_ids
from flaxformer_mt.decoding.search.ranking import length_penalty
from flaxformer_mt.decoding.search.search import search, start
from flaxformer_mt.decoding.search.state import (
    IMPOSSIBLE,
    StepOutput,
    gather_hypotheses,
    unconstrained,
)

BEAM = SearchOptions(**SPECIAL, beam_size=3, n_best=3, length_penalty=1.0)
GREEDY = SearchOptions(**SPECIAL)
BAD_PHRASES = ((3, 4), (5, 5), (4, 3, 5))
UNCONSTRAINED = [Constraints(P)] * B

# Options that are compiled once each; Hypothesis draws the numbers among them.
ARRANGEMENTS = {
    "greedy": GREEDY,
    "greedy, penalties": dataclasses.replace(
        GREEDY, coverage_penalty=0.2, repetition_penalty=1.0, renormalize=True, min_length=True
    ),
    "never": BEAM,
    "rules": dataclasses.replace(
        BEAM, no_repeat_ngram_size=2, bad_phrases=BAD_PHRASES, min_length=True, renormalize=True
    ),
    "groups": dataclasses.replace(BEAM, beam_groups=3),
    "all": dataclasses.replace(
        BEAM,
        beam_size=4,
        n_best=4,
        beam_groups=2,
        early_stopping="heuristic",
        coverage_penalty=0.2,
        repetition_penalty=1.0,
        no_repeat_ngram_size=1,
        bad_phrases=BAD_PHRASES,
        min_length=True,
        force_end=True,
        renormalize=True,
    ),
}


def search_slowly(world, row, constraints, options):
    """Returns the hypotheses of one row."""
    logits, attention = (array[row].astype(np.float64) for array in world)
    return slow_search(
        lambda tokens: logits[node_of(tokens)].tolist(),
        constraints,
        options,
        lambda tokens: attention[node_of(tokens)].tolist(),
    )


@pytest.mark.slow_except("all")
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@settings(max_examples=15)
@given(seeds, ends, numbers, three_constraints)
def test_search_matches_the_slow_search(arrangement, seed, end, numbers, per_row):
    world, options = random_world(seed, end), with_numbers(ARRANGEMENTS[arrangement], numbers)
    result = find(world, batched(per_row), options)
    for row, constraints in enumerate(per_row):
        assert_row_is(result, row, search_slowly(world, row, constraints, options))


@pytest.mark.slow_except("0.0-never-3", "1.0-first-2")
@pytest.mark.parametrize(
    ("alpha", "early_stopping", "steps"),
    [(0.0, "never", 3), (1.0, "never", 4), (1.0, "heuristic", 3), (1.0, "first", 2)],
)
def test_search_stops_when_nothing_better_is_expected(alpha, early_stopping, steps):
    # Ending immediately has log-probability log 0.46 = -0.78. Ending after one more token has -0.62
    # - 0.78 = -1.39, the score to beat. Continuing reaches -1.23, -1.85, -2.46 after 2, 3, 4
    # tokens. With alpha = 1, the score to beat is -1.39 / (7 / 6) = -1.19; the others, divided by
    # (10 / 6), the penalty of 5 tokens, are -0.74, -1.11, -1.48, and divided by their own, (7 / 6)
    # and (8 / 6), -1.06, -1.39.
    logits = jnp.log(jnp.array([1e-9, 1e-9, 0.46, 0.54, 1e-9, 1e-9]))
    steps_taken = []

    def step(tokens, state, positions):
        jax.debug.callback(lambda positions: steps_taken.append(int(positions[0])), positions)
        return StepOutput(jnp.broadcast_to(logits, (*tokens.shape, V))), state

    options = dataclasses.replace(
        BEAM, beam_size=2, n_best=1, length_penalty=alpha, early_stopping=early_stopping
    )
    begun = start(unconstrained(jnp.array([P])), (), options, P)
    result = search(step, gather_hypotheses, options, begun)
    jax.effects_barrier()
    assert result.tokens[0, 0, 0] == EOS
    assert sorted(steps_taken) == list(range(steps))


@pytest.mark.slow_except("all")
@pytest.mark.parametrize("arrangement", ["greedy", "never", "all"])
def test_logits_that_are_not_finite_give_no_hypothesis(arrangement):
    logits, attention = random_world(0)
    rows = batched(UNCONSTRAINED)
    for bad in (np.nan, np.inf, -np.inf):
        world = np.full_like(logits, bad), attention
        result = find(world, rows, ARRANGEMENTS[arrangement])
        assert not result.lengths.any()
        assert (result.scores == np.float32(IMPOSSIBLE)).all()


def test_an_impossible_wish_gives_no_hypothesis_and_disturbs_no_other():
    # Only the end token is left to choose from, and it would come too early.
    impossible = Constraints(P, minimum=2, allowed=frozenset({EOS}))
    world, options = random_world(0), ARRANGEMENTS["all"]
    result = find(world, batched([Constraints(P), impossible, Constraints(P)]), options)
    assert (result.lengths[:, 0] > 0).tolist() == [True, False, True]
    assert not np.isnan(result.scores).any()
    assert_row_is(result, 0, search_slowly(world, 0, Constraints(P), options))


def test_length_penalties():
    lengths = jnp.array([1, 7, 13])
    np.testing.assert_allclose(length_penalty(lengths, 1.0), [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(length_penalty(lengths, 0.0), [1, 1, 1])
    np.testing.assert_allclose(length_penalty(lengths, 0.5), np.sqrt([1, 2, 3]), rtol=1e-6)
    np.testing.assert_allclose(length_penalty(lengths, 1.0, "average"), lengths)


def test_coverage_needs_attention_and_mask():
    options = dataclasses.replace(BEAM, coverage_penalty=0.2)
    rows = unconstrained(jnp.array([P]))

    def blind_step(tokens, state, positions):
        return StepOutput(jnp.zeros((*tokens.shape, V))), state

    with pytest.raises(ValueError, match="source_mask"):
        start(rows, (), options, P)
    rows = rows._replace(source_mask=jnp.ones((1, S), bool))
    with pytest.raises(ValueError, match="returns attention"):
        search(blind_step, gather_hypotheses, options, start(rows, (), options, P))


def test_options_follow_from_the_configuration():
    model = TransformerConfig(pad_id=0, bos_id=1, eos_id=2)
    nothing = SearchOptions.from_config(DecodeConfig(), model)
    assert nothing == SearchOptions(1, 2, 0, beam_size=4, length_penalty=0.6, forbidden_ids=(0, 1))
    some = SearchOptions.from_config(
        DecodeConfig(
            sampling=True, n_best=3, top_p=0.9, min_length_factor=0.5, coverage_penalty=0.1
        ),
        model,
        bad_phrases=([5], [2], [3, 4]),
    )
    assert some == SearchOptions(
        1, 2, 0, beam_size=3, n_best=3, length_penalty=0.6, sampling=True, top_p=0.9,
        min_length=True, coverage_penalty=0.1, forbidden_ids=(0, 1, 5), bad_phrases=((3, 4),),
    )  # fmt: skip


def test_only_switches_make_another_program():
    options = SearchOptions.from_config(
        DecodeConfig(temperature=0.5, sampling=True), TransformerConfig()
    )
    other = dataclasses.replace(options, temperature=0.7, length_penalty=0.1)
    assert jax.tree.structure(options) == jax.tree.structure(other)
    assert jax.tree.structure(options) != jax.tree.structure(
        dataclasses.replace(options, temperature=None)
    )


@pytest.mark.parametrize(
    ("bos_id", "forbidden"),
    [(1, (0, 1)), (0, (0,)), (-1, (0,)), (2, (0,))],
    ids=["start token", "start from padding", "start from zeros", "start from the end token"],
)
def test_forbidden_tokens(bos_id, forbidden):
    model = TransformerConfig(pad_id=0, bos_id=bos_id, eos_id=2)
    assert forbidden_token_ids(model, DecodeConfig()) == forbidden
    allowed = forbidden_token_ids(model, DecodeConfig(allow_padding=True))
    assert allowed == tuple(token for token in forbidden if token != 0)
