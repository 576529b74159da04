"""Beam search with phrases that must appear, against enumeration and against a plain, slow one."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_search import Found, Wish, is_complete, score_of, token_scores
from toy_search import EOS, SPECIAL, WORDS, P, begin, find, node_of, random_world, rows_of

from flaxformer_mt.decoding.search import phrase_constraints as constraints
from flaxformer_mt.decoding.search.search import IMPOSSIBLE, SearchOptions

C, M = 2, 3  # Phrases of a row, their tokens.
B = 3
N_BEST = 3
SHORT = P - 1
ALL = len(WORDS) ** (SHORT - 1) * (len(WORDS) + 1)  # A beam that holds all of SHORT tokens.


@dataclasses.dataclass(frozen=True)
class PhraseWish(Wish):
    phrases: tuple[tuple[int, ...], ...] = ()


seeds = st.integers(0, 2**32 - 1)
words = st.sampled_from(WORDS)
phrases = st.lists(st.lists(words, min_size=1, max_size=M).map(tuple), max_size=C).map(tuple)


def three_wishes(longest):
    wish = st.builds(
        PhraseWish,
        limit=st.integers(0, longest),
        minimum=st.integers(0, longest),
        prefix=st.lists(words, max_size=2).map(tuple),
        phrases=phrases,
    )
    return st.lists(wish, min_size=B, max_size=B)


def options_of(beam_size, **others):
    return SearchOptions(
        **SPECIAL,
        beam_size=beam_size,
        n_best=min(beam_size, N_BEST),
        length_penalty=0.6,
        min_length=True,
        **others,
    )


def search_for(world, wishes, options, num_phrases=C):
    asked = np.full((B, num_phrases, M), -1, np.int32)
    for row, wish in enumerate(wishes):
        for place, phrase in enumerate(wish.phrases):
            asked[row, place, : len(phrase)] = phrase
    return find(world, rows_of(wishes)._replace(phrases=asked), options)


def occurrences(tokens, phrase):
    return sum(tokens[place : place + len(phrase)] == phrase for place in range(len(tokens)))


def begun(tokens, phrase):
    """How many tokens at the end are the beginning of the phrase, but not all of it."""
    sizes = range(min(len(phrase) - 1, len(tokens)), 0, -1)
    return next((size for size in sizes if tokens[-size:] == phrase[:size]), 0)


def lacking(tokens, wish):
    """The phrases that must still appear; one that is asked for twice must be there twice."""
    return [
        phrase
        for place, phrase in enumerate(wish.phrases)
        if occurrences(tokens, phrase) <= wish.phrases[:place].count(phrase)
    ]


def bank(tokens, wish):
    missing = lacking(tokens, wish)
    farthest = max((begun(tokens, phrase) for phrase in missing), default=0)
    return sum(map(len, wish.phrases)) - sum(map(len, missing)) + farthest


def continuations(logits, hypothesis, wish, options):
    """Every continuation that the row's wishes allow, best first."""
    tokens, total = hypothesis
    scores = token_scores(logits[node_of(tokens)].tolist(), tokens, wish, options)
    if lacking(tokens, wish) and not (options.force_end and len(tokens) == wish.limit - 1):
        scores[EOS] = -math.inf
    grown = [((*tokens, token), total + score) for token, score in enumerate(scores)]
    return sorted((h for h in grown if h[1] > -math.inf), key=lambda h: -h[1])


def best_results(complete, wish, options):
    fewest = min((len(lacking(tokens, wish)) for tokens, _ in complete), default=0)
    found = [
        Found(score_of(tokens, total, options, None), total, tokens)
        for tokens, total in complete
        if len(lacking(tokens, wish)) == fewest
    ]
    return sorted(found, reverse=True)[: options.n_best]


def enumerate_results(logits, wish, options):
    """The best of all hypotheses that there are."""
    complete, unfinished = [], [((), 0.0)] if wish.limit else []
    while unfinished:
        grown = [g for h in unfinished for g in continuations(logits, h, wish, options)]
        ends = [is_complete(tokens, wish, options) for tokens, _ in grown]
        complete += itertools.compress(grown, ends)
        unfinished = [h for h, is_end in zip(grown, ends, strict=True) if not is_end]
    return best_results(complete, wish, options)


def slow_search(logits, wish, options):
    """What `search` and `constraints` document, one hypothesis at a time, never stopping early."""
    width = options.beam_size
    complete, beam = [], [((), 0.0)]
    for _ in range(wish.limit):
        banks = {}
        for tokens, total in beam:
            wanted = {phrase[begun(tokens, phrase)] for phrase in lacking(tokens, wish)}
            grown = continuations(logits, (tokens, total), wish, options)
            for place, continuation in enumerate(grown):
                if place < 2 * width or continuation[0][-1] in wanted:
                    banks.setdefault(bank(continuation[0], wish), []).append(continuation)
        for members in banks.values():
            members.sort(key=lambda hypothesis: -hypothesis[1])
        turns = itertools.zip_longest(*(banks[number] for number in sorted(banks, reverse=True)))
        order = [h for turn in turns for h in turn if h is not None][: 2 * width]
        ends = [is_complete(tokens, wish, options) for tokens, _ in order]
        complete += itertools.compress(order[:width], ends)
        beam = [h for h, is_end in zip(order, ends, strict=True) if not is_end][:width]
        if options.independent and complete:  # Greedy search.
            break
    return best_results(complete, wish, options)


def tokens_of(result, row):
    lists = zip(result.tokens[row].tolist(), result.lengths[row].tolist(), strict=True)
    return [tuple(tokens[:length]) for tokens, length in lists if length]


def assert_row_is(result, row, expected):
    assert tokens_of(result, row) == [found.tokens for found in expected]
    scores = [found.score for found in expected]
    np.testing.assert_allclose(result.scores[row, : len(scores)], scores, rtol=1e-4, atol=1e-5)
    assert (result.scores[row, len(scores) :] == np.float32(IMPOSSIBLE)).all()


@settings(max_examples=30, deadline=None)
@given(seeds, three_wishes(SHORT))
def test_a_wide_beam_finds_the_best_with_all_phrases(seed, wishes):
    world, options = random_world(seed), options_of(ALL)
    result = search_for(world, wishes, options)
    for row, wish in enumerate(wishes):
        assert_row_is(result, row, enumerate_results(world[0][row], wish, options))


@settings(max_examples=100, deadline=None)
@given(seeds, three_wishes(P), st.sampled_from([(1, False), (2, True), (4, False)]))
def test_a_narrow_beam_finds_what_a_slow_one_finds(seed, wishes, kind):
    beam_size, force_end = kind
    world, options = random_world(seed), options_of(beam_size, force_end=force_end)
    result = search_for(world, wishes, options)
    for row, wish in enumerate(wishes):
        assert_row_is(result, row, slow_search(world[0][row], wish, options))


@settings(max_examples=50, deadline=None)
@given(seeds, three_wishes(P), st.sampled_from([1, 4]))
def test_a_row_without_phrases_is_found_as_if_no_row_had_any(seed, wishes, beam_size):
    world, options = random_world(seed), options_of(beam_size)
    wishes[0] = dataclasses.replace(wishes[0], phrases=())
    free = [dataclasses.replace(wish, phrases=()) for wish in wishes]
    beside_others = search_for(world, wishes, options)
    among_equals = search_for(world, free, options, num_phrases=0)
    assert tokens_of(beside_others, 0) == tokens_of(among_equals, 0)
    # Two programs, which the compiler may let round differently.
    np.testing.assert_allclose(beside_others.scores[0], among_equals.scores[0], rtol=1e-6)


def best_of(*wishes):
    """The best result of each wish, where the end comes at once and all else is improbable."""
    logits, attention = random_world(0)
    logits = np.full_like(logits, -20.0)
    logits[..., EOS] = 0.0
    nothing = [PhraseWish(limit=0)] * (B - len(wishes))
    result = search_for((logits, attention), [*wishes, *nothing], options_of(4))
    return [tokens_of(result, row)[0] for row in range(len(wishes))]


def test_an_improbable_phrase_is_there():
    one = PhraseWish(P, phrases=((3, 4),))
    two = PhraseWish(P, phrases=((5,), (4,)))
    found_one, found_two, found_none = best_of(one, two, PhraseWish(P))
    assert found_one == (3, 4, EOS)
    assert set(found_two) == {4, 5, EOS}
    assert found_none == (EOS,)


def test_phrases_may_share_tokens_and_the_prefix_counts():
    assert best_of(
        PhraseWish(P, phrases=((3, 4), (4, 5))),
        PhraseWish(P, phrases=((3, 4),), prefix=(3,)),
        PhraseWish(P, phrases=((4,),), prefix=(4,)),
    ) == [(3, 4, 5, EOS), (3, 4, EOS), (4, EOS)]


def test_what_is_asked_for_twice_is_there_twice():
    assert best_of(
        PhraseWish(P, phrases=((3,), (3,))),
        PhraseWish(P, phrases=((3, 3), (3, 3))),
        PhraseWish(P, phrases=((3, 4), (3, 4))),
    ) == [(3, 3, EOS), (3, 3, 3, EOS), (3, 4, 3, 4, EOS)]


def test_without_room_for_all_phrases_most_are_there():
    assert best_of(PhraseWish(1, phrases=((3, 4, 5), (4,)))) == [(4,)]


def test_progress_with_phrases_that_overlap_themselves():
    tokens = np.array([[[3, 3, 4, 3, 3], [3, 3, 3, 5, 5]]], np.int32)
    asked = np.array([[[3, 3, 4], [3, 3, -1], [3, 3, -1], [-1, -1, -1]]], np.int32)
    found = constraints.progress(tokens, np.array([[5, 3]]), asked)
    assert found.lacking.tolist() == [[[False] * 4, [True, False, False, False]]]
    assert found.begun.tolist() == [[[2, 1, 1, 0], [2, 1, 1, 0]]]
    assert constraints.banks(found, asked).tolist() == [[7, 6]]
    assert constraints.next_tokens(found, asked).tolist() == [[[-1] * 4, [4, -1, -1, -1]]]


def test_samples_cannot_have_phrases():
    asked = rows_of([Wish(P)] * B)._replace(phrases=np.full((B, C, M), 3, np.int32))
    with pytest.raises(ValueError, match="not sampled"):
        begin(random_world(0), asked, options_of(2, sampling=True))
