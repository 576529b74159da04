"""Scores of given translations agree with the model and with the search."""

import dataclasses
import math

import numpy as np
import pytest
from talker import exhaust_memory, sentences

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.decoding.scoring import scorer as scorer_module
from flaxformer_mt.decoding.scoring import teacher_forcing
from flaxformer_mt.decoding.scoring.scorer import PairScore, Scorer
from flaxformer_mt.errors import UserError

SOURCES = [*sentences(5), "", *sentences(2, seed=3, longest=8)]
TARGETS = [*sentences(2, seed=4), "", *sentences(5, seed=5, longest=8)]


def score(talker, sources=SOURCES, targets=TARGETS):
    return list(Scorer(*talker.parts).stream(zip(sources, targets, strict=True)))


def test_scores_are_those_of_the_full_pass_of_each_pair(talker):
    for source, target, found in zip(SOURCES, TARGETS, score(talker), strict=True):
        tokens = (*talker.tokenizers.target.encode([target])[0], talker.model.eos_id)
        expected = talker.full_pass(source, tokens)
        assert found.tokens == tokens
        np.testing.assert_allclose(found.token_log_probabilities, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.log_probability, expected.sum(), rtol=1e-5)


def test_scores_can_be_normalized():
    decode = DecodeConfig(length_penalty=0.5)
    found = PairScore((7, 8, 9, 2), (-1.0, -2.0, -3.0, -4.0))
    assert found.normalized("none", decode) == -10
    assert found.normalized("tokens", decode) == -2.5
    assert math.isclose(found.normalized("search", decode), -10 / 1.5**0.5, rel_tol=1e-6)
    average = DecodeConfig(length_penalty=0.5, length_penalty_kind="average")
    assert math.isclose(found.normalized("search", average), -5, rel_tol=1e-6)


def test_pairs_are_read_lazily(talker, monkeypatch):
    monkeypatch.setattr(scorer_module, "CHUNK_SIZE", 3)
    read = []

    def pairs():
        for pair in zip(SOURCES, TARGETS, strict=True):
            read.append(pair)
            yield pair

    scorer = Scorer(*talker.parts)
    stream = scorer.stream(pairs())
    first = next(stream)
    assert len(read) == 3
    assert [first, *stream] == score(talker)


def test_several_translations_of_a_sentence_are_scored_as_pairs(talker):
    scorer = Scorer(*talker.parts)
    candidates = [(SOURCES[0], TARGETS[:3]), (SOURCES[1], TARGETS[3:4])]
    found = list(scorer.stream_candidates(candidates))
    assert [(each.source, list(each.targets)) for each in found] == candidates
    pairs = score(talker, [SOURCES[0]] * 3 + [SOURCES[1]], TARGETS[:4])
    assert [each.scores for each in found] == [pairs[:3], pairs[3:]]


def test_language_models_are_rejected(talker):
    model = dataclasses.replace(talker.config.model, has_inputs=False, tie_embeddings="none")
    with pytest.raises(UserError, match=r"model\.has_inputs=False"):
        Scorer(model, talker.params, talker.tokenizers)


def test_a_device_without_enough_memory_is_explained(monkeypatch, talker):
    monkeypatch.setattr(teacher_forcing, "target_log_probabilities", exhaust_memory)
    with pytest.raises(UserError, match=r"^scoring needs more memory .*shorten the longest lines"):
        score(talker, ["ein Hund"], ["die Wiese"])
