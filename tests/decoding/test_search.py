"""Search in a toy world, against a plain, slow search and against enumeration."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_search import Found, Wish, is_ruled_out, penalty_of, slow_search, token_scores
from toy_search import (
    EOS,
    PAD,
    SPECIAL,
    WORDS,
    B,
    P,
    S,
    V,
    find,
    find_one_after_the_other,
    node_of,
    random_world,
    rows_of,
)

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.decoding.search import search as search_room
from flaxformer_mt.decoding.search.search import (
    IMPOSSIBLE,
    SearchOptions,
    StepOutput,
    length_penalty,
    unconstrained,
)

BEAM = SearchOptions(**SPECIAL, beam_size=3, n_best=3, length_penalty=1.0)
GREEDY = SearchOptions(**SPECIAL)
BAD_PHRASES = ((3, 4), (5, 5), (4, 3, 5))
WITHOUT_LIMITS = [Wish(P)] * B

# What options are compiled for; the numbers among them are drawn anew for each example.
ARRANGEMENTS = {
    "greedy": GREEDY,
    "greedy, penalties": dataclasses.replace(
        GREEDY, coverage_penalty=0.2, repetition_penalty=1.0, renormalize=True, min_length=True
    ),
    "never": BEAM,
    "heuristic": dataclasses.replace(
        BEAM, early_stopping="heuristic", length_penalty_kind="average"
    ),
    "first": dataclasses.replace(BEAM, early_stopping="first", beam_size=2, n_best=1),
    "coverage": dataclasses.replace(BEAM, early_stopping="heuristic", coverage_penalty=0.2),
    "rules": dataclasses.replace(
        BEAM, no_repeat_ngram_size=2, bad_phrases=BAD_PHRASES, min_length=True, renormalize=True
    ),
    "forced end": dataclasses.replace(
        BEAM, force_end=True, repetition_penalty=1.0, min_length=True
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

seeds = st.integers(0, 2**32 - 1)
ends = st.floats(-4, 4)
numbers = st.fixed_dictionaries(
    {
        "length_penalty": st.floats(0, 4),
        "coverage_penalty": st.floats(0.01, 1),
        "repetition_penalty": st.floats(0.5, 3),
        "diversity_penalty": st.floats(0, 3),
    }
)
three_wishes = st.lists(
    st.builds(
        Wish,
        limit=st.integers(0, P),
        minimum=st.integers(0, P),
        prefix=st.lists(st.sampled_from(WORDS), max_size=2).map(tuple),
        allowed=st.none() | st.frozensets(st.sampled_from(WORDS)).map(lambda some: some | {EOS}),
    ),
    min_size=B,
    max_size=B,
)


def with_numbers(options, drawn):
    """The options, with other numbers where they have numbers at all."""
    kept = {name: v for name, v in drawn.items() if getattr(options, name) is not None}
    return dataclasses.replace(options, **kept)


def search_slowly(world, row, wish, options):
    """The hypotheses of one row of the toy world."""
    logits, attention = (array[row].astype(np.float64) for array in world)
    return slow_search(
        lambda tokens: logits[node_of(tokens)].tolist(),
        wish,
        options,
        lambda tokens: attention[node_of(tokens)].tolist(),
    )


def assert_row_is(result, row, expected):
    """The row holds exactly the expected hypotheses, in this order."""
    empty = result.lengths.shape[1] - len(expected)
    assert result.lengths[row].tolist() == [len(found.tokens) for found in expected] + [0] * empty
    for place, found in enumerate(expected):
        padding = [PAD] * (P - len(found.tokens))
        assert result.tokens[row, place].tolist() == [*found.tokens, *padding]
        np.testing.assert_allclose(result.scores[row, place], found.score, atol=2e-5)
        np.testing.assert_allclose(
            result.log_probabilities[row, place], found.log_probability, atol=2e-5
        )
    assert (result.scores[row, len(expected) :] == np.float32(IMPOSSIBLE)).all()
    assert (result.tokens[row, len(expected) :] == PAD).all()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@settings(max_examples=25, deadline=None)
@given(seeds, ends, numbers, three_wishes)
def test_it_finds_what_a_slow_search_finds(arrangement, seed, end, numbers, wishes):
    world, options = random_world(seed, end), with_numbers(ARRANGEMENTS[arrangement], numbers)
    result = find(world, rows_of(wishes), options)
    for row, wish in enumerate(wishes):
        assert_row_is(result, row, search_slowly(world, row, wish, options))


WIDEST = dataclasses.replace(
    BEAM,
    beam_size=len(WORDS) ** (P - 1) * (len(WORDS) + 1),  # It holds every hypothesis.
    n_best=6,
    no_repeat_ngram_size=2,
    bad_phrases=BAD_PHRASES,
    min_length=True,
)


def enumerate_hypotheses(world, row, wish, options):
    """Every hypothesis that the rules allow, best first."""
    logits = world[0][row].astype(np.float64)
    every = [
        (*words, *end)
        for length in range(wish.limit + 1)
        for words in itertools.product(WORDS, repeat=length)
        for end in ((), (EOS,))
        if length + len(end) == wish.limit or (end and length < wish.limit)
    ]
    complete = []
    for tokens in every if wish.limit else []:
        beginnings = [tokens[:place] for place in range(len(tokens))]
        follows_rules = tokens[: len(wish.prefix)] == wish.prefix[: len(tokens)] and not any(
            is_ruled_out(beginning, token, wish, options)
            for beginning, token in zip(beginnings, tokens, strict=True)
            if len(beginning) >= len(wish.prefix)
        )
        if follows_rules:
            total = sum(
                token_scores(logits[node_of(beginning)].tolist(), beginning, wish, options)[token]
                for beginning, token in zip(beginnings, tokens, strict=True)
            )
            complete.append(Found(total / penalty_of(len(tokens), options), total, tokens))
    return sorted(complete, reverse=True)


@settings(max_examples=12, deadline=None)
@given(seeds, ends, numbers, three_wishes)
def test_a_wide_beam_finds_what_enumeration_finds(seed, end, numbers, wishes):
    world, options = random_world(seed, end), with_numbers(WIDEST, numbers)
    result = find(world, rows_of(wishes), options)
    for row, wish in enumerate(wishes):
        assert_row_is(
            result, row, enumerate_hypotheses(world, row, wish, options)[: options.n_best]
        )


@pytest.mark.parametrize("arrangement", ["greedy", "all"])
def test_rows_that_join_late_find_what_they_find_alone(arrangement):
    options, world = ARRANGEMENTS[arrangement], random_world(0, end=1.0)
    rows = rows_of([Wish(P), Wish(3, minimum=1), Wish(P, minimum=2, prefix=(3,))])
    late = find_one_after_the_other(world, rows, options)
    for ours, theirs in zip(late, find(world, rows, options), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("arrangement", ["greedy", "never", "all"])
def test_rows_do_not_influence_each_other(arrangement):
    options, world = ARRANGEMENTS[arrangement], random_world(1)
    wishes = [Wish(P), Wish(4), Wish(2)]
    together = find(world, rows_of(wishes), options)
    for row, wish in enumerate(wishes):
        alone = find(world, rows_of([wish if r == row else Wish(0) for r in range(B)]), options)
        for ours, theirs in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ours[row], theirs[row])


@pytest.mark.parametrize(
    ("alpha", "early_stopping", "steps"),
    [(0.0, "never", 3), (1.0, "never", 4), (1.0, "heuristic", 3), (1.0, "first", 2)],
)
def test_search_stops_when_nothing_better_is_expected(alpha, early_stopping, steps):
    # To end at once has log 0.46 = -0.78; to end after one more token, -0.62 - 0.78 = -1.39, is to
    # beat. To go on comes to -1.23, -1.85, -2.46 after 2, 3, 4 tokens. If alpha is 1, what is to
    # beat is -1.39 / (7 / 6) = -1.19. The others divided by (10 / 6), the penalty of 5 tokens, are
    # -0.74, -1.11, -1.48; divided by (7 / 6) and (8 / 6), their own, -1.06, -1.39.
    logits = jnp.log(jnp.array([1e-9, 1e-9, 0.46, 0.54, 1e-9, 1e-9]))
    steps_taken = []

    def step(tokens, state, positions):
        jax.debug.callback(lambda positions: steps_taken.append(int(positions[0])), positions)
        return StepOutput(jnp.broadcast_to(logits, (*tokens.shape, V))), state

    options = dataclasses.replace(
        BEAM, beam_size=2, n_best=1, length_penalty=alpha, early_stopping=early_stopping
    )
    result = search_room.search(step, (), unconstrained(jnp.array([P])), options, P)
    jax.effects_barrier()
    assert result.tokens[0, 0, 0] == EOS
    assert sorted(steps_taken) == list(range(steps))


@pytest.mark.parametrize("arrangement", ["greedy", "never", "all"])
def test_logits_that_are_not_finite_give_no_hypothesis(arrangement):
    logits, attention = random_world(0)
    rows = rows_of(WITHOUT_LIMITS)
    for bad in (np.nan, np.inf, -np.inf):
        world = np.full_like(logits, bad), attention
        result = find(world, rows, ARRANGEMENTS[arrangement])
        assert not result.lengths.any()
        assert (result.scores == np.float32(IMPOSSIBLE)).all()


@pytest.mark.parametrize("arrangement", ["greedy, penalties", "rules", "all"])
def test_logits_of_minus_infinity_only_rule_out_tokens(arrangement):
    logits, attention = random_world(0)
    logits[:, :, 4] = -np.inf
    result = find((logits, attention), rows_of(WITHOUT_LIMITS), ARRANGEMENTS[arrangement])
    assert result.lengths[:, 0].all()
    assert not (result.tokens == 4).any()
    for array in result:
        assert np.isfinite(array).all()


@pytest.mark.parametrize("arrangement", ["greedy, penalties", "rules"])
def test_an_impossible_wish_gives_no_hypothesis_and_disturbs_no_other(arrangement):
    # Only the end token is left to choose from, and it would come too early.
    impossible = Wish(P, minimum=2, allowed=frozenset({EOS}))
    world, options = random_world(0), ARRANGEMENTS[arrangement]
    result = find(world, rows_of([Wish(P), impossible, Wish(P)]), options)
    assert (result.lengths[:, 0] > 0).tolist() == [True, False, True]
    assert not np.isnan(result.scores).any()
    assert_row_is(result, 0, search_slowly(world, 0, Wish(P), options))


def test_a_prefix_counts_like_all_other_tokens():
    world, wish = random_world(3), Wish(P, prefix=(5, 4))
    result = find(world, rows_of([wish] * B), GREEDY)
    log_probabilities = jax.nn.log_softmax(world[0][0])
    tokens = result.tokens[0, 0, : result.lengths[0, 0]].tolist()
    assert tokens[:2] == [5, 4]
    expected = sum(log_probabilities[node_of(tokens[:i]), t] for i, t in enumerate(tokens))
    np.testing.assert_allclose(result.log_probabilities[0, 0], expected, rtol=1e-5)


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
        search_room.start(rows, (), options, P)
    rows = rows._replace(source_mask=jnp.ones((1, S), bool))
    with pytest.raises(ValueError, match="returns attention"):
        search_room.search(blind_step, (), rows, options, P)


def test_padding_of_the_source_needs_no_coverage():
    logits, attention = random_world(0)
    rows, options = rows_of(WITHOUT_LIMITS), ARRANGEMENTS["coverage"]
    without, fully = (attention * [1, 1, 1, 0] + [0, 0, 0, all_of_it] for all_of_it in (0, 1))
    mask = rows.source_mask & [True, True, True, False]
    masked = find((logits, without.astype(np.float32)), rows._replace(source_mask=mask), options)
    expected = find((logits, fully.astype(np.float32)), rows, options)
    for ours, theirs in zip(masked, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    unmasked = find((logits, without.astype(np.float32)), rows, options)
    assert (unmasked.scores < masked.scores - 10).all()


def test_options_follow_from_the_configuration():
    nothing = SearchOptions.from_config(DecodeConfig(), bos_id=1, eos_id=2, pad_id=0)
    assert nothing == SearchOptions(1, 2, 0, beam_size=4, length_penalty=0.6)
    some = SearchOptions.from_config(
        DecodeConfig(
            sampling=True, n_best=3, top_p=0.9, min_length_factor=0.5, coverage_penalty=0.1
        ),
        bos_id=1,
        eos_id=2,
        pad_id=0,
        forbidden_ids=(0, 1),
        bad_phrases=([5], [2], [3, 4]),
    )
    assert some == SearchOptions(
        1, 2, 0, beam_size=3, n_best=3, length_penalty=0.6, sampling=True, top_p=0.9,
        min_length=True, coverage_penalty=0.1, forbidden_ids=(0, 1, 5), bad_phrases=((3, 4),),
    )  # fmt: skip


def test_only_switches_make_another_program():
    options = SearchOptions.from_config(
        DecodeConfig(temperature=0.5, sampling=True), bos_id=1, eos_id=2, pad_id=0
    )
    other = dataclasses.replace(options, temperature=0.7, length_penalty=0.1)
    assert jax.tree.structure(options) == jax.tree.structure(other)
    assert jax.tree.structure(options) != jax.tree.structure(
        dataclasses.replace(options, temperature=None)
    )
