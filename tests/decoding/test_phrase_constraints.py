"""Beam search with required phrases, compared with enumeration and a slow implementation."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_search import Constraints, Found, is_complete, score_of, token_scores
from toy_search import EOS, SPECIAL, WORDS, P, batched, begin, find, node_of, random_world

from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.state import IMPOSSIBLE

C, M = 2, 3  # Phrases of a row, their tokens.
B = 3
N_BEST = 3
SHORT = P - 1
ALL = len(WORDS) ** (SHORT - 1) * (
    len(WORDS) + 1
)  # A beam wide enough for all hypotheses of SHORT tokens.


@dataclasses.dataclass(frozen=True)
class PhraseConstraints(Constraints):
    phrases: tuple[tuple[int, ...], ...] = ()


seeds = st.integers(0, 2**32 - 1)
words = st.sampled_from(WORDS)
phrases = st.lists(st.lists(words, min_size=1, max_size=M).map(tuple), max_size=C).map(tuple)


def three_constraints(longest):
    constraints = st.builds(
        PhraseConstraints,
        limit=st.integers(0, longest),
        minimum=st.integers(0, longest),
        prefix=st.lists(words, max_size=2).map(tuple),
        phrases=phrases,
    )
    return st.lists(constraints, min_size=B, max_size=B)


def options_of(beam_size, **others):
    return SearchOptions(
        **SPECIAL,
        beam_size=beam_size,
        n_best=min(beam_size, N_BEST),
        length_penalty=0.6,
        min_length=True,
        **others,
    )


def search_for(world, per_row, options, num_phrases=C):
    required = np.full((B, num_phrases, M), -1, np.int32)
    for row, constraints in enumerate(per_row):
        for index, phrase in enumerate(constraints.phrases):
            required[row, index, : len(phrase)] = phrase
    return find(world, batched(per_row)._replace(phrases=required), options)


def occurrences(tokens, phrase):
    return sum(tokens[index : index + len(phrase)] == phrase for index in range(len(tokens)))


def lacking(tokens, constraints):
    """Returns the phrases that must still appear; one given twice must appear twice."""
    return [
        phrase
        for index, phrase in enumerate(constraints.phrases)
        if occurrences(tokens, phrase) <= constraints.phrases[:index].count(phrase)
    ]


def continuations(logits, hypothesis, constraints, options):
    """Returns every continuation that the row's constraints allow, best first."""
    tokens, total = hypothesis
    scores = token_scores(logits[node_of(tokens)].tolist(), tokens, constraints, options)
    if lacking(tokens, constraints) and not (
        options.force_end and len(tokens) == constraints.limit - 1
    ):
        scores[EOS] = -math.inf
    grown = [((*tokens, token), total + score) for token, score in enumerate(scores)]
    return sorted((h for h in grown if h[1] > -math.inf), key=lambda h: -h[1])


def best_results(complete, constraints, options):
    fewest = min((len(lacking(tokens, constraints)) for tokens, _ in complete), default=0)
    found = [
        Found(score_of(tokens, total, options, None), total, tokens)
        for tokens, total in complete
        if len(lacking(tokens, constraints)) == fewest
    ]
    return sorted(found, reverse=True)[: options.n_best]


def enumerate_results(logits, constraints, options):
    """Returns the best of all hypotheses."""
    complete, unfinished = [], [((), 0.0)] if constraints.limit else []
    while unfinished:
        grown = [g for h in unfinished for g in continuations(logits, h, constraints, options)]
        ends = [is_complete(tokens, constraints, options) for tokens, _ in grown]
        complete += itertools.compress(grown, ends)
        unfinished = [h for h, is_end in zip(grown, ends, strict=True) if not is_end]
    return best_results(complete, constraints, options)


def tokens_of(result, row):
    lists = zip(result.tokens[row].tolist(), result.lengths[row].tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in lists if length]


def assert_row_is(result, row, expected):
    assert tokens_of(result, row) == [found.tokens for found in expected]
    scores = [found.score for found in expected]
    np.testing.assert_allclose(result.scores[row, : len(scores)], scores, rtol=1e-4, atol=1e-5)
    assert (result.scores[row, len(scores) :] == np.float32(IMPOSSIBLE)).all()


@settings(max_examples=12)
@given(seeds, three_constraints(SHORT))
def test_a_wide_beam_finds_the_best_with_all_phrases(seed, per_row):
    world, options = random_world(seed), options_of(ALL)
    result = search_for(world, per_row, options)
    for row, constraints in enumerate(per_row):
        assert_row_is(result, row, enumerate_results(world[0][row], constraints, options))


def best_of(*per_row):
    """Returns the best result of each row when every token but the end is improbable."""
    logits, attention = random_world(0)
    logits = np.full_like(logits, -20.0)
    logits[..., EOS] = 0.0
    nothing = [PhraseConstraints(limit=0)] * (B - len(per_row))
    result = search_for((logits, attention), [*per_row, *nothing], options_of(4))
    return [tokens_of(result, row)[0] for row in range(len(per_row))]


def test_phrases_may_share_tokens_and_the_prefix_counts():
    assert best_of(
        PhraseConstraints(P, phrases=((3, 4), (4, 5))),
        PhraseConstraints(P, phrases=((3, 4),), prefix=(3,)),
        PhraseConstraints(P, phrases=((4,),), prefix=(4,)),
    ) == [(3, 4, 5, EOS), (3, 4, EOS), (4, EOS)]


def test_a_phrase_given_twice_appears_twice():
    assert best_of(
        PhraseConstraints(P, phrases=((3,), (3,))),
        PhraseConstraints(P, phrases=((3, 3), (3, 3))),
        PhraseConstraints(P, phrases=((3, 4), (3, 4))),
    ) == [(3, 3, EOS), (3, 3, 3, EOS), (3, 4, 3, 4, EOS)]


def test_the_fewest_phrases_are_lacking_if_not_all_fit():
    assert best_of(PhraseConstraints(1, phrases=((3, 4, 5), (4,)))) == [(4,)]


def test_sampling_does_not_support_phrases():
    required = batched([Constraints(P)] * B)._replace(phrases=np.full((B, C, M), 3, np.int32))
    with pytest.raises(ValueError, match="not supported with sampling"):
        begin(random_world(0), required, options_of(2, sampling=True))
