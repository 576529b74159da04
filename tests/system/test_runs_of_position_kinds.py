"""Models with each position kind of self-attention are trained, continued and translated with."""

import jax
import numpy as np
import pytest
from small_runs import metrics

from flaxformer_mt.cli import training
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.trained_model import load_run


def options(workdir, kind, num_steps):
    return [
        "--config=configs/reverse.py",
        f"--workdir={workdir}",
        f"--model.position-kind={kind}",
        f"--train.num-steps={num_steps}",
        "--train.checkpoint-every=150",
        "--train.eval-every=150",
        "--optimizer.schedule=constant",
        "--optimizer.warmup-steps=100",
        "--parallel.num-devices=1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rotary", "alibi", "t5_relative"])
def test_300_steps_of_reverse_in_two_parts(kind, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    training.train(training.parse_flags(options(whole, kind, 300)))
    for num_steps in (150, 300):
        flags = training.parse_flags(options(parts, kind, num_steps))
        training.train(flags)
    runs = [load_run(workdir, "last") for workdir in (whole, parts)]
    for leaves in zip(*(jax.tree.leaves(run.params) for run in runs), strict=True):
        np.testing.assert_array_equal(*leaves)
    losses = [line["loss"] for line in metrics(parts) if line["split"] == "train"]
    assert losses[-1] < losses[0] / 2
    test = load_corpus(flags.data, flags.data.test_split)
    hypotheses = Translator.from_run(parts).translate(test.sources[:100])
    # The first digit of the result is the last of the source, whatever its length.
    right = sum(h[:1] == t[:1] for h, t in zip(hypotheses, test.targets[:100], strict=True))
    assert right >= 50
