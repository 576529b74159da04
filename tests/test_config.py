"""Configurations: validation, JSON, and what a run may be continued with."""

import dataclasses
import json

import pytest

from flaxformer_mt import config as configuration
from flaxformer_mt.config import (
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.errors import UserError

CHANGED = ExperimentConfig(
    model=TransformerConfig(d_model=24, num_heads=3, dtype="bfloat16"),
    optimizer=OptimizerConfig(kind="adamw", weight_decay=0.1),
)
NESTED = ExperimentConfig(
    data=DataConfig(
        train_corpora=(
            CorpusConfig(path="a", kind="tsv"),
            CorpusConfig(path="b", tag="<bt>", weight=2),
        ),
        bucket_lengths=(8, 24),
    ),
    train=TrainConfig(freeze=("encoder/", "embedding")),
    parallel=ParallelConfig(sharding_rules=(("embedding", "fsdp,tensor"),)),
)


@pytest.mark.parametrize("experiment", [ExperimentConfig(), CHANGED, NESTED])
def test_json_and_back(experiment):
    assert configuration.from_json(configuration.to_json(experiment)) == experiment


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_modle": 3}, "unknown configuration field model.d_modle"),
        ({"d_model": "wide"}, "model.d_model cannot be 'wide'"),
        ({"d_model": True}, "model.d_model cannot be True"),
        ({"norm_position": "middle"}, "model.norm_position cannot be 'middle'"),
        ({"dropout_rate": None}, "model.dropout_rate cannot be None"),
    ],
)
def test_damaged_json_names_the_field(change, message):
    values = configuration.to_dict(ExperimentConfig())
    values["model"] |= change
    with pytest.raises(UserError, match=message):
        configuration.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        ("data", {"bucket_lengths": [8, "x"]}, "data.bucket_lengths.1 cannot be 'x'"),
        ("data", {"bucket_lengths": 8}, "data.bucket_lengths is no list"),
        ("data", {"train_corpora": [{"pth": 1}]}, "unknown configuration field data.train_corpora"),
        ("data", {"train_corpora": [{"kind": "csv"}]}, "train_corpora.0.kind cannot be 'csv'"),
        ("parallel", {"sharding_rules": [["x"]]}, "sharding_rules.0 needs 2 values"),
    ],
)
def test_damaged_lists_name_the_place(group, change, message):
    values = configuration.to_dict(NESTED)
    values[group] |= change
    with pytest.raises(UserError, match=message):
        configuration.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3}'])
def test_json_that_is_no_configuration(text):
    with pytest.raises(UserError):
        configuration.from_json(text)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (TransformerConfig, {"dropout_rate": 1.0}, "model.dropout_rate"),
        (TransformerConfig, {"source_vocab_size": 5, "target_vocab_size": 6}, "one vocabulary"),
        (TrainConfig, {"num_steps": 0}, "train.num_steps"),
        (DecodeConfig, {"n_best": 9}, "decode.n_best=9 is more than decode.beam_size=4"),
        (OptimizerConfig, {"weight_decay": 0.1}, "needs optimizer.kind=adamw"),
        (ExperimentConfig, {"train": TrainConfig(batch_tokens=100)}, "not a multiple"),
        (DataConfig, {"bucket_lengths": (32, 16)}, "must be rising"),
        (DataConfig, {"max_unknown_rate": 2}, "data.max_unknown_rate"),
        (CorpusConfig, {"weight": 0}, "weight must be positive"),
        (TrainConfig, {"ema_decay": 1.0}, "train.ema_decay"),
        (ParallelConfig, {"strategy": "pmap", "fsdp": 2}, "pmap cannot cut parameters"),
    ],
)
def test_values_that_do_not_go_together(kind, values, message):
    with pytest.raises(UserError, match=message):
        kind(**values)


def test_differences_name_the_fields_that_forbid_going_on():
    longer = dataclasses.replace(ExperimentConfig(), train=TrainConfig(num_steps=7, log_every=3))
    assert configuration.differences(ExperimentConfig(), longer) == []
    assert configuration.differences(ExperimentConfig(), CHANGED) == [
        "model.d_model: 512 in the run, 24 now",
        "model.num_heads: 8 in the run, 3 now",
        "model.dtype: float32 in the run, bfloat16 now",
        "optimizer.kind: adam in the run, adamw now",
        "optimizer.weight_decay: 0.0 in the run, 0.1 now",
    ]


def test_corpora_may_move_but_not_change():
    def with_corpus(**fields):
        return ExperimentConfig(data=DataConfig(train_corpora=(CorpusConfig(**fields),)))

    assert configuration.differences(with_corpus(path="a"), with_corpus(path="b")) == []
    changed = configuration.differences(with_corpus(tag="<de>"), with_corpus(tag="<fr>"))
    assert len(changed) == 1
    assert changed[0].startswith("data.train_corpora: ")


def test_a_schedule_that_knows_its_end_forbids_another_end():
    cycle = ExperimentConfig(optimizer=OptimizerConfig(schedule="one_cycle"))
    longer = dataclasses.replace(cycle, train=TrainConfig(num_steps=7))
    assert configuration.differences(cycle, longer) == ["train.num_steps: 100000 in the run, 7 now"]


def test_resumable_fields_exist():
    values = configuration.to_dict(ExperimentConfig())
    for field in configuration.RESUMABLE_FIELDS:
        group, name = field.split(".")
        assert name in values[group]
