"""An experiment as a script runs it."""

import dataclasses

import numpy as np
import pytest

import flaxformer_mt
from flaxformer_mt import experiment
from flaxformer_mt.config import (
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.errors import UserError

CONFIG = ExperimentConfig(
    model=TransformerConfig(
        d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
    ),
    data=DataConfig(corpus="reverse", generated_pairs=50, vocab_size=280),
    train=TrainConfig(
        num_steps=2, batch_tokens=256, eval_every=2, checkpoint_every=2, eval_sentences=1
    ),
    decode=DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=2),
    parallel=ParallelConfig(num_devices=1),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return flaxformer_mt.train(CONFIG, tmp_path_factory.mktemp("runs") / "run")


def test_training_returns_the_run(run):
    assert run.config == CONFIG
    assert run.latest_step == 2
    assert [row["split"] for row in run.metrics()] == ["train", "valid", "test"]
    assert np.isfinite(run.metrics("test")[0]["loss"])


def test_a_run_is_continued(run):
    longer = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, num_steps=3))
    assert flaxformer_mt.train(longer, run.folder).latest_step == 3


def test_one_resolved_configuration_reaches_all_parts(run, tmp_path):
    """The run folder keeps the configuration as it was given."""
    parts = experiment.prepare(CONFIG, tmp_path, write=False)
    vocab_size = parts.dataset.tokenizers.source.vocab_size
    assert parts.config.model.source_vocab_size == vocab_size
    assert parts.model.config == parts.config.model
    assert parts.config.data.source_row_length == parts.dataset.training.shapes[0].source_length
    assert run.config.model.source_vocab_size == 0
    # The start of a run names the possible exports, a dry run also what prevents the others.
    assert dict(parts.report())["exports"] == "ctranslate2, jax; not marian, marian-native"
    reasons = [line for _, line in parts.export_obstacles()]
    assert reasons[0].startswith("not marian: position_layout=interleaved cannot be")


def changed(**groups):
    """The configuration with other values: `decode={"beam_size": 2}`."""
    return dataclasses.replace(
        CONFIG,
        **{
            name: dataclasses.replace(getattr(CONFIG, name), **fields)
            for name, fields in groups.items()
        },
    )


@pytest.mark.parametrize("start", [experiment.train, experiment.dry_run])
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"decode": {"shortlist": "absent"}}, "decode.shortlist=absent: there is no such file"),
        ({"decode": {"shortlist": "/"}}, "decode.shortlist=/: a folder, not a file"),
        ({"decode": {"bad_word_ids": ("280",)}}, "decode.bad_word_ids: 280 is not a token"),
        (
            {"decode": {"copy_unknown": True, "alignment_layer": 3}},
            "decode.alignment_layer=3: the decoder has 1 layers",
        ),
        ({"train": {"init_from": "absent"}}, "train.init_from=absent: there is no such file"),
        ({"train": {"init_from": "tests"}}, "train.init_from=tests: tests is not a run folder"),
        ({"data": {"tokenizer_path": "absent"}}, "data.tokenizer_path=absent"),
        (
            {"train": {"init_from": "absent"}, "data": {"tokenizer_path": "absent"}},
            "train.init_from=absent: there is no such file",
        ),
    ],
)
def test_what_options_name_is_checked_before_anything_long(
    tmp_path, monkeypatch, start, groups, message
):
    def no_tokens(*arguments, **options):
        raise AssertionError("the corpus was tokenized")

    monkeypatch.setattr(experiment, "tokenize", no_tokens)
    with pytest.raises(UserError) as caught:
        start(changed(**groups), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
