"""Samples: their distribution, and that each is a function of its row's key alone."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
from slow_search import Constraints, token_scores
from toy_search import (
    EOS,
    PAD,
    SPECIAL,
    B,
    P,
    V,
    batched,
    find,
    node_of,
    random_world,
)

from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.decoding.search.search import start

SAMPLES = 8
PLAIN = SearchOptions(
    **SPECIAL, beam_size=SAMPLES, n_best=SAMPLES, sampling=True, length_penalty=0.6
)
ALL = dataclasses.replace(
    PLAIN, temperature=1.5, top_k=3, top_p=0.9, min_p=0.05, epsilon_cutoff=0.1
)


def distribution(logits, options):
    """Returns the probability of each token, applying the options sequentially in Python."""
    scores = dict(enumerate(logits / (options.temperature or 1.0)))

    def probabilities():
        total = scipy.special.logsumexp(list(scores.values()))
        return {token: math.exp(score - total) for token, score in scores.items()}

    def keep(tokens):
        return {token: scores[token] for token in tokens}

    if options.top_k:
        scores = keep(sorted(scores, key=scores.get, reverse=True)[: options.top_k])
    if options.top_p is not None:
        kept, total = [], 0.0
        for token in sorted(scores, key=scores.get, reverse=True):
            if total < options.top_p:
                kept.append(token)
            total += probabilities()[token]
        scores = keep(kept)
    if options.min_p is not None:
        now = probabilities()
        scores = keep(t for t in now if now[t] >= options.min_p * max(now.values()))
    if options.epsilon_cutoff is not None:
        now = probabilities()
        likely = [t for t in now if now[t] >= options.epsilon_cutoff]
        scores = keep(likely or [max(now, key=now.get)])
    return probabilities()


def sequence_probabilities(logits, constraints, options):
    """Returns the probability of every sequence of tokens that can be sampled."""
    complete, unfinished = {}, {(): 1.0}
    while unfinished:
        grown = {}
        for tokens, probability in unfinished.items():
            scores = token_scores(logits[node_of(tokens)].tolist(), tokens, constraints, options)
            for token, share in distribution(np.array(scores), options).items():
                if share > 0:
                    grown[*tokens, token] = probability * share
        ends = {t for t in grown if t[-1] == EOS or len(t) == constraints.limit}
        complete |= {tokens: grown[tokens] for tokens in ends}
        unfinished = {tokens: p for tokens, p in grown.items() if tokens not in ends}
    return complete


def drawn(result):
    """Returns all samples of all rows, as tuples of tokens."""
    return [
        tuple(tokens[:length].tolist())
        for row in zip(result.tokens, result.lengths, strict=True)
        for tokens, length in zip(*row, strict=True)
    ]


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
def test_sequences_are_drawn_with_their_probabilities(options):
    num_rows, constraints = 500, Constraints(2)
    one_world = random_world(2, batch_size=1)
    world = tuple(np.repeat(array, num_rows, axis=0) for array in one_world)
    result = find(world, batched([constraints] * num_rows, seeds=range(num_rows)), options)
    counts = collections.Counter(drawn(result))
    expected = sequence_probabilities(one_world[0][0].astype(np.float64), constraints, options)
    assert set(counts) <= set(expected)
    sequences = list(expected)
    total = num_rows * SAMPLES
    _, p_value = scipy.stats.chisquare(
        [counts[tokens] for tokens in sequences],
        [expected[tokens] * total for tokens in sequences],
    )
    assert p_value > 0.01
    assert total > 20 * len(expected)


def test_options_exclude_sequences():
    logits = random_world(2, batch_size=1)[0][0].astype(np.float64)
    every = len(sequence_probabilities(logits, Constraints(2), PLAIN))
    for name in ("top_k", "top_p", "min_p", "epsilon_cutoff"):
        option = dataclasses.replace(PLAIN, **{name: getattr(ALL, name)})
        assert len(sequence_probabilities(logits, Constraints(2), option)) < every, name


def test_samples_depend_on_the_key_alone():
    logits, attention = random_world(3, end=-3.0, batch_size=1)
    world = np.repeat(logits, B, axis=0), np.repeat(attention, B, axis=0)
    per_row = [Constraints(P)] * B
    first = find(world, batched(per_row, seeds=[7, 8, 9]), PLAIN)
    second = find(world, batched(per_row, seeds=[9, 7, 7]), PLAIN)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[1])
        np.testing.assert_array_equal(ours[0], theirs[2])
        np.testing.assert_array_equal(ours[2], theirs[0])
    assert drawn(first)[:SAMPLES] != drawn(first)[SAMPLES : 2 * SAMPLES]
    assert len(set(drawn(first))) > SAMPLES


def test_samples_keep_to_the_rules():
    options = dataclasses.replace(
        ALL, no_repeat_ngram_size=1, bad_phrases=((3, 4),), min_length=True, force_end=True
    )
    per_row = [Constraints(P, minimum=2, prefix=(5,)), Constraints(4, minimum=1), Constraints(0)]
    result = find(random_world(6), batched(per_row, seeds=[1, 2, 3]), options)
    samples = drawn(result)
    assert not result.lengths[2].any()
    for number, tokens in enumerate(samples[: 2 * SAMPLES]):
        constraints = per_row[number // SAMPLES]
        assert constraints.minimum < len(tokens) <= constraints.limit
        assert tokens[-1] == EOS
        assert tokens[: len(constraints.prefix)] == constraints.prefix
        assert len(set(tokens)) == len(tokens)
        assert (3, 4) not in itertools.pairwise(tokens)
        assert PAD not in tokens
        assert max(tokens) < V


def test_a_phrase_cannot_be_required_of_samples():
    rows = batched([Constraints(P)])._replace(phrases=np.full((1, 1, 1), 3, np.int32))
    with pytest.raises(ValueError, match="not supported with sampling"):
        start(rows, (), PLAIN, P)
