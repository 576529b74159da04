"""Metrics of teacher forcing, against fast.ai's formula and sacreBLEU."""

import dataclasses
import random

import numpy as np
import pytest
import sacrebleu

from flaxformer_mt.config import ExperimentConfig, TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.teacher_forced import seq2seq_acc, teacher_forced_bleu

PAD = -1


@pytest.fixture
def sentences():
    generator = random.Random(5)
    targets = [
        [generator.randrange(3, 9) for _ in range(generator.randrange(1, 12))] for _ in range(150)
    ]
    predictions = [
        [token if generator.random() < 0.7 else generator.randrange(3, 9) for token in target]
        for target in targets
    ]
    return predictions, targets, [generator.randrange(1, 20) for _ in targets]


def padded_accuracy(predictions, targets):
    """fast.ai's, of one batch: both sides padded to one length, then compared everywhere."""
    length = max(map(len, targets))
    sides = [
        np.array([[*tokens, *[PAD] * (length - len(tokens))] for tokens in side])
        for side in (predictions, targets)
    ]
    return np.mean(sides[0] == sides[1]), len(targets)


def test_seq2seq_acc_is_that_of_padded_batches(sentences):
    predictions, targets, source_lengths = sentences
    order = sorted(range(len(targets)), key=lambda index: -source_lengths[index])
    parts = [
        padded_accuracy([predictions[i] for i in batch], [targets[i] for i in batch])
        for batch in (order[:64], order[64:128], order[128:])
    ]
    means, sizes = zip(*parts, strict=True)
    expected = np.average(means, weights=sizes)
    assert seq2seq_acc(predictions, targets, source_lengths) == pytest.approx(expected, abs=1e-12)
    tokens = sum(map(len, targets))
    right = sum(
        predicted == token
        for pair in zip(predictions, targets, strict=True)
        for predicted, token in zip(*pair, strict=True)
    )
    assert expected > right / tokens


def test_teacher_forced_bleu_is_that_of_tokens(sentences):
    predictions, targets, _ = sentences
    words = [
        [" ".join(f"w{token}" for token in tokens) for tokens in side] for side in sentences[:2]
    ]
    expected = sacrebleu.corpus_bleu(
        words[0], [words[1]], tokenize="none", smooth_method="none", force=True
    )
    assert teacher_forced_bleu(predictions, targets) == pytest.approx(expected.score)
    assert teacher_forced_bleu(targets, targets) == pytest.approx(100)


def test_language_models_have_none():
    config = ExperimentConfig(model=TransformerConfig(has_inputs=False, num_encoder_layers=0))
    train = dataclasses.replace(config.train, teacher_forced_metrics=("seq2seq_acc",))
    with pytest.raises(UserError, match="teacher_forced_metrics are for translation models"):
        dataclasses.replace(config, train=train)
    for name, metric in (("best_metric", "bleu"), ("early_stopping_metric", "chrf")):
        train = dataclasses.replace(config.train, **{name: metric})
        with pytest.raises(UserError, match=rf"train\.{name}={metric} is for translation models"):
            dataclasses.replace(config, train=train)
