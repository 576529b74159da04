"""Configurations: roles and bounds of fields, validation, JSON, continuation of runs."""

import dataclasses
import json
import math
import re
import typing

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
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.fields import (
    FieldRole,
    bounds_of,
    option,
    type_hints,
)
from flaxformer_mt.errors import UserError

CLASSES = (*groups().values(), CorpusConfig)
FIELDS = [(kind, field) for kind in CLASSES for field in dataclasses.fields(kind)]
NUMBERS = (int, float, tuple[int, ...])
NUMERIC = [(kind, field) for kind, field in FIELDS if type_hints(kind)[field.name] in NUMBERS]
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
        ({"d_model": True}, "model.d_model=True: must be an integer"),
        ({"norm_position": "middle"}, "model.norm_position='middle': must be one of 'post', 'pre'"),
        ({"dropout_rate": None}, "model.dropout_rate=None: must be a number"),
        ({"dropout_rate": math.nan}, "model.dropout_rate=nan: must be a finite number"),
    ],
)
def test_invalid_json_values_name_the_field(change, message):
    values = configuration.to_dict(ExperimentConfig())
    values["model"] |= change
    with pytest.raises(UserError, match=message):
        configuration.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        ("data", {"bucket_lengths": [8, "x"]}, "data.bucket_lengths.1='x': must be an integer"),
        ("data", {"bucket_lengths": 8}, "data.bucket_lengths=8: must be a list"),
        (
            "data",
            {"train_corpora": [{"kind": "xml"}]},
            "train_corpora.0.kind='xml': must be one of",
        ),
        ("parallel", {"sharding_rules": [["x"]]}, "sharding_rules.0: must have 2 values"),
    ],
)
def test_invalid_items_of_lists_name_the_item(group, change, message):
    values = configuration.to_dict(NESTED)
    values[group] |= change
    with pytest.raises(UserError, match=message):
        configuration.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3}'])
def test_json_that_is_not_a_configuration_is_rejected(text):
    with pytest.raises(UserError):
        configuration.from_json(text)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (TransformerConfig, {"dropout_rate": 1.0}, "model.dropout_rate=1.0: must be at most 0.99"),
        (TransformerConfig, {"source_vocab_size": 5, "target_vocab_size": 6}, "one vocabulary"),
        (TrainConfig, {"num_steps": 0}, "train.num_steps=0: must be at least 1"),
        (DecodeConfig, {"n_best": 9}, "decode.n_best=9 is more than decode.beam_size=4"),
        (OptimizerConfig, {"weight_decay": 0.1}, "needs optimizer.kind=adamw or muon"),
        (ExperimentConfig, {"train": TrainConfig(batch_tokens=100)}, "not a multiple"),
        (
            ExperimentConfig,
            {"model": TransformerConfig(num_decoder_layers=0)},
            "model.num_decoder_layers=0: must be at least 1 in a run",
        ),
        (TrainConfig, {"watch": ("caf\udce9",)}, "must be valid Unicode"),
        (DataConfig, {"path": "corp\udcff"}, "must be valid Unicode"),
        (DataConfig, {"bucket_lengths": (32, 16)}, "must be in increasing order"),
        (DataConfig, {"max_unknown_rate": 2}, "data.max_unknown_rate=2: must be at most 1"),
        (CorpusConfig, {"weight": 0}, "CorpusConfig.weight=0: must be above 0"),
        *(
            (CorpusConfig, {"tag": f"<2{wrong}de>"}, "CorpusConfig.tag=.*: must be words between")
            for wrong in "\t\v\f\x1c\x85\xa0\u2028\u2029\u200b\u3000\u2581\r\n"
        ),
        (CorpusConfig, {"tag": "<2de> </s>"}, "and the special tokens of a vocabulary"),
        (TrainConfig, {"ema_decay": 1.0}, "train.ema_decay=1.0: must be below 1"),
        (ParallelConfig, {"strategy": "pmap", "fsdp": 2}, "pmap cannot shard parameters"),
        (
            ParallelConfig,
            {"strategy": "pmap", "sharding_rules": (("embedding$", "fsdp,-"),)},
            "omit parallel.sharding_rules",
        ),
        (ParallelConfig, {"strategy": "pmap", "axes": ("experts=2",)}, "omit parallel.axes"),
        (ParallelConfig, {"axes": ("experts",)}, r"parallel.axes=.*: must be NAME=SIZE"),
        (ParallelConfig, {"axes": ("fsdp=2",)}, r"parallel.axes=.*: must be NAME=SIZE"),
    ],
)
def test_invalid_values_are_rejected(kind, values, message):
    with pytest.raises(UserError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.7}, "decode.temperature=0.7 needs decode.sampling or decode.mbr_sam"),
        ({"min_p": 0.1}, "decode.min_p=0.1 needs decode.sampling"),
        ({"sampling": True, "mbr_samples": 4}, "decode.mbr_samples=4 exclude each other"),
        ({"sampling": True, "beam_groups": 2}, "decode.beam_groups=2 is for beam search"),
        ({"shortlist_first": 5}, "decode.shortlist_first=5 needs decode.shortlist"),
        ({"min_length": 5, "max_length": 5}, "decode.min_length=5 leaves no room"),
        ({"min_length_factor": 2.0}, "decode.min_length_factor=2.0 is more than decode.max_len"),
    ],
)
def test_search_options_that_do_not_go_together_are_rejected(values, message):
    with pytest.raises(UserError, match=re.escape(message)):
        DecodeConfig(**values)


def test_differences_name_the_fields_that_forbid_continuation():
    longer = dataclasses.replace(ExperimentConfig(), train=TrainConfig(num_steps=7, log_every=3))
    assert configuration.differences(ExperimentConfig(), longer) == {}
    assert [*configuration.differences(ExperimentConfig(), CHANGED).values()] == [
        "model.d_model: 512 in the run, 24 now",
        "model.num_heads: 8 in the run, 3 now",
        "model.dtype: float32 in the run, bfloat16 now",
        "optimizer.kind: adam in the run, adamw now",
        "optimizer.weight_decay: 0.0 in the run, 0.1 now",
    ]


# Written out, because the roles decide it: a changed role must not let a run be continued with
# another model, or forbid what was allowed.
CONTINUABLE = {
    "data": {
        "alignments",
        "bad_rows",
        "check_languages",
        "normalization",
        "path",
        "workers",
    },
    "model": {"remat"},
    "optimizer": set(),
    "train": {
        "num_steps", "log_every", "eval_every", "eval_sentences",
        "checkpoint_every", "keep_last",
        "teacher_forced_metrics",
        "watch", "keep_best", "show_translations", "early_stopping_patience", "max_skipped_steps",
        "init_from", "init_optimizer", "profile_steps", "trackers",
    },
    "parallel": {field.name for field in dataclasses.fields(ParallelConfig)},
    "decode": {field.name for field in dataclasses.fields(DecodeConfig)},
}  # fmt: skip


def test_the_roles_decide_what_a_run_is_continued_with():
    names = {f"{group}.{name}" for group, names in CONTINUABLE.items() for name in names}
    assert names == {name for name, kind in configuration.CONTINUATIONS.items() if kind == "free"}


# Roles and bounds.


def identify(value):
    return value.__name__ if isinstance(value, type) else getattr(value, "name", None)


def test_a_field_without_a_role_cannot_be_declared():
    with pytest.raises(TypeError, match="needs a role"):
        option("relu")
    with pytest.raises(TypeError, match="needs a lower bound"):
        option(3, FieldRole.RUNNING)


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=identify)
def test_exactly_the_numbers_have_bounds_and_defaults_are_within(kind, field):
    bounds = bounds_of(field)
    assert (bounds is not None) == ((kind, field) in NUMERIC)
    if bounds is not None:
        assert -math.inf < bounds.lowest < bounds.highest < math.inf


def numbers(kind, field, *values):
    """The field set to each of these numbers."""
    is_tuple = typing.get_origin(type_hints(kind)[field.name]) is tuple
    return [{field.name: (value,) if is_tuple else value} for value in values]


@pytest.mark.parametrize(("kind", "field"), NUMERIC, ids=identify)
def test_numbers_out_of_bounds_are_rejected_by_name(kind, field):
    bounds = bounds_of(field)
    invalid = [math.nan, math.inf, -math.inf, 1e20, 10**20, 10**400, -(10**400), "1", None, True]
    if type_hints(kind)[field.name] is not float:
        invalid += [bounds.lowest + 0.5, float(bounds.highest)]
    below = bounds.lowest if bounds.excludes_lowest else bounds.lowest - 1
    above = bounds.highest if bounds.excludes_highest else bounds.highest + 1
    invalid += [value for value in (below, above) if value not in bounds.also]
    if bounds.lowest > -1 and -1 not in bounds.also:
        invalid.append(-1)
    for values in numbers(kind, field, *invalid):
        with pytest.raises(UserError, match=rf"\.{field.name}(\.0)?=.*: must be "):
            kind(**values)
        with pytest.raises(UserError, match=rf"{field.name}(\.0)?=.*: must be "):
            configuration.from_dict(values, kind)


@pytest.mark.parametrize(("kind", "field"), NUMERIC, ids=identify)
def test_the_ends_of_an_interval_and_sentinels_are_valid(kind, field):
    bounds = bounds_of(field)
    ends = [
        (bounds.lowest, bounds.excludes_lowest),
        (bounds.highest, bounds.excludes_highest),
    ]
    valid = [end for end, is_excluded in ends if not is_excluded] + list(bounds.also)
    assert [bounds.problem(value) for value in valid] == [""] * len(valid)
    assert bounds.problem(field.default if field.default != (16, 32, 64) else 16) == ""


def test_a_loss_that_excludes_padding_needs_a_padding_token():
    train = TrainConfig(label_smoothing=0.1, label_smoothing_convention="non_pad_kl")
    with pytest.raises(UserError, match=r"non_pad_kl needs .* model\.pad_id=-1: use others_kl"):
        ExperimentConfig(model=TransformerConfig(pad_id=-1), train=train)
