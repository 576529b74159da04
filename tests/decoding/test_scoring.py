"""Forced decoding agrees with the model and with the search."""

import math

import numpy as np
import pytest
from talker import sentences, with_decode

from flaxformer_mt.decoding.scoring import PairScore, perplexity, score_pairs
from flaxformer_mt.errors import UserError

SOURCES = [*sentences(5), "", *sentences(2, seed=3, longest=8)]
TARGETS = [*sentences(2, seed=4), "", *sentences(5, seed=5, longest=8)]


def score(talker, sources=SOURCES, targets=TARGETS):
    return score_pairs(talker.config, talker.params, talker.tokenizers, sources, targets)


def test_scores_are_those_of_the_full_pass_of_each_pair(talker):
    for source, target, found in zip(SOURCES, TARGETS, score(talker), strict=True):
        tokens = (*talker.tokenizers.target.encode([target])[0], talker.model.eos_id)
        expected = talker.full_pass(source, tokens)
        assert found.tokens == tokens
        np.testing.assert_allclose(found.token_log_probabilities, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.log_probability, expected.sum(), rtol=1e-5)


def test_a_score_does_not_depend_on_its_company(talker):
    together = score(talker)
    alone = [score(talker, [s], [t])[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert alone == together
    one_by_one = score(with_decode(talker, batch_tokens=1))
    for ours, theirs in zip(one_by_one, together, strict=True):
        np.testing.assert_allclose(
            ours.token_log_probabilities, theirs.token_log_probabilities, rtol=1e-4, atol=1e-5
        )


def test_perplexity_is_of_tokens():
    scores = [
        PairScore((5, 2), (math.log(0.5), math.log(0.25))),
        PairScore((2,), (math.log(0.125),)),
    ]
    assert math.isclose(perplexity(scores), 4.0)


def test_different_numbers_of_sentences_are_refused(talker):
    with pytest.raises(UserError, match="8 source sentences, but 7 target sentences"):
        score(talker, targets=TARGETS[1:])
