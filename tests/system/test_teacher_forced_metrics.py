"""Validations report the metrics of teacher forcing that a run asks for."""

import jax
import numpy as np
import pytest
from small_runs import flags

from flaxformer_mt import experiment
from flaxformer_mt.cli import training
from flaxformer_mt.decoding.scoring.teacher_forcing import predict_tokens


@pytest.mark.slow
def test_a_validation_reports_the_metrics_that_are_asked_for(text, tmp_path):
    options = ["--train.teacher-forced-metrics", "seq2seq_acc", "teacher_forced_bleu"]
    config = training.parse_flags(flags(text, tmp_path, *options)).experiment()
    parts = experiment.prepare(config, tmp_path)
    params = parts.initial_state().params
    metrics, _ = parts.validation.validate(params)
    assert metrics["seq2seq_acc"] > metrics["accuracy"]
    assert 0 <= metrics["teacher_forced_bleu"] < 100

    corpus = parts.dataset.valid.tokens
    sources, targets = (
        [list(map(int, tokens)) for tokens in side] for side in (corpus.sources, corpus.targets)
    )
    predictions = predict_tokens(
        jax.device_get(params), parts.config.model, parts.config.decode, sources, targets
    )
    right = np.concatenate([np.equal(*pair) for pair in zip(predictions, targets, strict=True)])
    # Packed rows round otherwise, and an untrained model has ties.
    assert right.mean() == pytest.approx(metrics["accuracy"], abs=5e-3)
