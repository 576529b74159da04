"""Search over toy vocabularies, against enumeration and against a plain, slow beam search."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxformer_mt.decoding.search import IMPOSSIBLE, beam_search, greedy_search, length_penalty

V, P, B = 5, 4, 3  # Vocabulary, longest hypothesis, rows.
PAD, BOS, EOS = 0, 1, 2
ALL = (V - 2) ** P  # A beam that holds every sequence of the tokens that may be chosen.
NODES = sum(V**depth for depth in range(P))  # Prefixes of fewer than P tokens.

seeds = st.integers(0, 2**32 - 1)
alphas = st.floats(0, 2, width=32)
limits = st.lists(st.integers(0, P), min_size=B, max_size=B)


def random_logits(seed, end=0.0):
    """Logits [B, NODES, V] of the token after each prefix; `end` is added to the end token's."""
    logits = np.random.default_rng(seed).normal(size=(B, NODES, V)).astype(np.float32) * 2
    logits[..., EOS] += end
    return logits


def child(node, token):
    """The number of the prefix that is prefix `node` and one more token; 0 is the empty one."""
    return node * V + token + 1


def tree_step(tables, tokens, nodes, position):
    """A step function whose logits depend on all that came before: its state is the prefix."""
    nodes = jnp.where(position == 0, 0, child(nodes, tokens))
    return jnp.take_along_axis(tables, nodes[..., None], axis=1), nodes


@functools.partial(jax.jit, static_argnames=("beam_size", "n_best", "forbidden_ids"))
def search(tables, max_lengths, alpha, *, beam_size, n_best=1, forbidden_ids=(PAD, BOS)):
    return beam_search(
        functools.partial(tree_step, tables),
        jnp.zeros((B, beam_size), jnp.int32),
        max_lengths=max_lengths,
        max_length=P,
        beam_size=beam_size,
        n_best=n_best,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        forbidden_ids=forbidden_ids,
        alpha=alpha,
    )


@jax.jit
def search_greedily(tables, max_lengths, alpha):
    return greedy_search(
        functools.partial(tree_step, tables),
        jnp.zeros((B, 1), jnp.int32),
        max_lengths=max_lengths,
        max_length=P,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        forbidden_ids=(PAD, BOS),
        alpha=alpha,
    )


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def next_tokens(log_probabilities, prefix, forbidden):
    """Every allowed (prefix + token, log-probability of the token)."""
    node = functools.reduce(child, prefix, 0)
    for token in set(range(V)) - set(forbidden):
        yield (*prefix, token), log_probabilities[node, token]


def enumerate_hypotheses(log_probabilities, limit, alpha, forbidden=(PAD, BOS)):
    """Every complete hypothesis as (score, log-probability, tokens), best first."""
    complete, unfinished = [], [((), 0.0)]
    for length in range(1, limit + 1):
        grown = [
            (tokens, total + gain)
            for prefix, total in unfinished
            for tokens, gain in next_tokens(log_probabilities, prefix, forbidden)
        ]
        unfinished = [(t, total) for t, total in grown if t[-1] != EOS and length < limit]
        complete += [
            (total / penalty(length, alpha), total, t)
            for t, total in grown
            if t[-1] == EOS or length == limit
        ]
    return sorted(complete, reverse=True)


def slow_beam_search(log_probabilities, limit, alpha, beam_size, n_best, forbidden=(PAD, BOS)):
    """What `beam_search` documents, one row, one hypothesis at a time, never stopping early."""
    complete, beam = [], [((), 0.0)]
    for length in range(1, limit + 1):
        grown = [
            (tokens, total + gain)
            for prefix, total in beam
            for tokens, gain in next_tokens(log_probabilities, prefix, forbidden)
        ]
        grown.sort(key=lambda hypothesis: -hypothesis[1])
        complete += [
            (total / penalty(length, alpha), total, t)
            for t, total in grown[:beam_size]
            if t[-1] == EOS or length == limit
        ]
        beam = [(t, total) for t, total in grown[: 2 * beam_size] if t[-1] != EOS][:beam_size]
    return sorted(complete, reverse=True)[:n_best]


def assert_row_is(result, row, expected):
    """The row holds exactly the expected (score, log-probability, tokens), in this order."""
    n_best = result.lengths.shape[1]
    assert result.lengths[row].tolist() == [len(t) for _, _, t in expected] + [0] * (
        n_best - len(expected)
    )
    for n, (score, total, tokens) in enumerate(expected):
        assert result.tokens[row, n].tolist() == [*tokens] + [PAD] * (P - len(tokens))
        np.testing.assert_allclose(result.scores[row, n], score, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result.log_probabilities[row, n], total, rtol=1e-5, atol=1e-5)
    assert (result.scores[row, len(expected) :] == np.float32(IMPOSSIBLE)).all()


@settings(max_examples=50, deadline=None)
@given(seeds, alphas, limits, st.floats(-4, 4))
def test_a_wide_beam_finds_what_enumeration_finds(seed, alpha, max_lengths, end):
    tables, n_best = random_logits(seed, end), 5
    result = search(tables, np.array(max_lengths, np.int32), alpha, beam_size=ALL, n_best=n_best)
    for row, limit in enumerate(max_lengths):
        expected = enumerate_hypotheses(log_softmax(tables[row]), limit, alpha)[:n_best]
        assert_row_is(result, row, expected if limit else [])


@settings(max_examples=100, deadline=None)
@given(seeds, alphas, limits, st.floats(-4, 4), st.sampled_from([(1, 1), (2, 2), (3, 1), (3, 3)]))
def test_a_narrow_beam_finds_what_a_slow_one_finds(seed, alpha, max_lengths, end, size):
    tables, (beam_size, n_best) = random_logits(seed, end), size
    result = search(
        tables, np.array(max_lengths, np.int32), alpha, beam_size=beam_size, n_best=n_best
    )
    for row, limit in enumerate(max_lengths):
        expected = slow_beam_search(log_softmax(tables[row]), limit, alpha, beam_size, n_best)
        assert_row_is(result, row, expected)


@settings(max_examples=50, deadline=None)
@given(seeds, limits, st.floats(-4, 4))
def test_greedy_is_a_beam_of_one_without_length_penalty(seed, max_lengths, end):
    tables, max_lengths = random_logits(seed, end), np.array(max_lengths, np.int32)
    greedy = search_greedily(tables, max_lengths, 0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        greedy, search(tables, max_lengths, 0.0, beam_size=1)
    )
    chex.assert_trees_all_close(greedy, search(tables, max_lengths, 0.0, beam_size=1), rtol=1e-6)


def test_greedy_reports_the_score_of_its_hypothesis():
    result = search_greedily(random_logits(0), np.full(B, P, np.int32), 0.7)
    expected = result.log_probabilities / length_penalty(result.lengths, 0.7)
    np.testing.assert_allclose(result.scores, expected, rtol=1e-6)


@pytest.mark.parametrize("find", [search_greedily, functools.partial(search, beam_size=3)])
def test_a_hypothesis_without_end_token_keeps_all_its_tokens(find):
    max_lengths = np.array([P, 2, 1], np.int32)
    result = find(random_logits(1, end=-50.0), max_lengths, 0.6)
    np.testing.assert_array_equal(result.lengths[:, 0], max_lengths)
    assert not (result.tokens == EOS).any()
    assert (result.scores > IMPOSSIBLE).all()


def test_hypotheses_with_and_without_end_token_compete_by_score():
    # The end token is improbable at every step, so what never ends is better than what does.
    logits = np.full((B, NODES, V), -100.0, np.float32)
    logits[..., 3], logits[..., EOS] = 0.0, -3.0
    result = search(logits, np.full(B, P, np.int32), 1.0, beam_size=2, n_best=2)
    assert result.tokens[0].tolist() == [[3, 3, 3, 3], [3, 3, 3, EOS]]


def test_results_are_sorted_and_distinct():
    result = search(random_logits(2), np.full(B, P, np.int32), 0.6, beam_size=8, n_best=8)
    assert (np.diff(result.scores, axis=1) <= 0).all()
    for row in result.tokens.tolist():
        assert len({tuple(tokens) for tokens in row}) == 8


def test_rows_do_not_influence_each_other():
    tables, lengths = random_logits(3), np.array([P, 3, 2], np.int32)
    together = search(tables, lengths, 0.6, beam_size=3, n_best=3)
    for row in range(B):
        only = np.arange(B) == row
        alone = search(tables, np.where(only, lengths, 0), 0.6, beam_size=3, n_best=3)
        for ours, theirs in zip(alone, together, strict=True):
            np.testing.assert_array_equal(ours[row], theirs[row])


def test_forbidden_tokens_are_never_chosen():
    result = search(
        random_logits(4), np.full(B, P, np.int32), 0.6, beam_size=3, n_best=3, forbidden_ids=(3,)
    )
    assert not (result.tokens == 3).any()
    assert (result.tokens == BOS).any()


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 2), (2.0, 3)])
def test_search_stops_when_nothing_can_get_better(alpha, steps):
    # To end at once has log 0.46 = -0.78; going on comes to log 0.54 = -0.62, -1.23, -1.85, so two
    # steps show that nothing can win. A penalty of 1.5**2 for four tokens makes that -0.27, -0.55,
    # -0.82: three steps.
    steps_taken = []

    def step(tokens, state, position):
        jax.debug.callback(lambda position: steps_taken.append(int(position)), position)
        logits = jnp.log(jnp.array([1e-9, 1e-9, 0.46, 0.54, 1e-9]))
        return jnp.broadcast_to(logits, (*tokens.shape, V)), state

    result = beam_search(
        step,
        (),
        max_lengths=jnp.array([P]),
        max_length=P,
        beam_size=2,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        alpha=alpha,
    )
    jax.effects_barrier()
    assert result.tokens[0, 0, 0] == EOS
    assert sorted(steps_taken) == list(range(steps))


@pytest.mark.parametrize("find", [search_greedily, functools.partial(search, beam_size=3)])
def test_logits_that_are_not_finite_give_no_hypothesis(find):
    result = find(np.full((B, NODES, V), np.nan, np.float32), np.full(B, P, np.int32), 0.6)
    assert not result.lengths.any()
    assert (result.scores == np.float32(IMPOSSIBLE)).all()


def test_length_penalty_is_that_of_gnmt():
    lengths = jnp.array([1, 7, 13])
    np.testing.assert_allclose(length_penalty(lengths, 1.0), [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(length_penalty(lengths, 0.0), [1, 1, 1])
    np.testing.assert_allclose(length_penalty(lengths, 0.5), np.sqrt([1, 2, 3]), rtol=1e-6)
