"""Forced decoding agrees with the model and with the search."""

import math

import jax
import numpy as np
import pytest

from decoding.conftest import sentences, with_decode, with_end_bias
from flaxformer_mt.decoding.scoring import PairScore, perplexity, score_pairs
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer

SOURCES = [*sentences(5), "", *sentences(2, seed=3, longest=20)]
TARGETS = [*sentences(2, seed=4), "", *sentences(5, seed=5, longest=15)]


def score(setup, sources=SOURCES, targets=TARGETS):
    return score_pairs(setup.config, setup.params, setup.tokenizers, sources, targets)


def test_scores_are_those_of_the_full_pass_of_each_pair(setup):
    model = Translator(setup.config, setup.params, setup.tokenizers).model
    scores = score(setup)
    for source, target, found in zip(SOURCES, TARGETS, scores, strict=True):
        source_row = [*setup.tokenizers.source.encode([source])[0], model.eos_id]
        target_row = [*setup.tokenizers.target.encode([target])[0], model.eos_id]
        logits = Transformer(model).apply(
            {"params": setup.params},
            np.array([source_row], np.int32),
            np.array([[model.bos_id, *target_row[:-1]]], np.int32),
        )
        expected = jax.nn.log_softmax(logits)[0, np.arange(len(target_row)), target_row]
        assert found.tokens == tuple(target_row)
        np.testing.assert_allclose(found.token_log_probabilities, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.log_probability, expected.sum(), rtol=1e-5)


def test_a_score_does_not_depend_on_its_company(setup):
    together = score(setup)
    alone = [score(setup, [s], [t])[0] for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert alone == together
    one_by_one = score(with_decode(setup, batch_tokens=1))
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


def test_different_numbers_of_sentences_are_refused(setup):
    with pytest.raises(UserError, match="8 source sentences, but 7 target sentences"):
        score(setup, targets=TARGETS[1:])
