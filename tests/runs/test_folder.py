"""Configurations, texts and vocabularies that a run cannot be continued with."""

import json
import shutil

import jax.numpy as jnp
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, read_tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment.checks import check_same_run
from flaxformer_mt.runs import folder as run_folder
from flaxformer_mt.runs.averaging import average_run
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params, write_params
from flaxformer_mt.runs.folder import (
    check_texts,
    has_run,
    read_config,
    read_fingerprints,
    read_origin,
)
from flaxformer_mt.training.state import TrainState

EXPERIMENT = ExperimentConfig()
PAIRS = ["one two three", "four five", "six"], ["eins zwei drei", "vier fünf", "sechs"]


def texts(sources=PAIRS[0]):
    train, valid = ParallelCorpus(sources, PAIRS[1], "train.en"), ParallelCorpus(*PAIRS, "valid.en")
    return {
        role: [(corpus.name, corpus.fingerprint)]
        for role, corpus in (("train", train), ("valid", valid))
    }


def write_run(folder, config, texts, tokenizers, origin=()):
    fingerprints = {role: [mark for _, mark in own] for role, own in texts.items()}
    fingerprints["tokenizer"] = tokenizers.fingerprints
    run_folder.write_run(folder, config, tokenizers.files, fingerprints, dict(origin))


def holds_run(folder, config):
    """Whether a folder holds a run; raises errors if that cannot be continued."""
    return has_run(folder) and check_same_run(folder, config) is not None


def learn(vocab_size):
    return Tokenizers.train([ParallelCorpus(*PAIRS, "text")], DataConfig(vocab_size=vocab_size))


@pytest.fixture(scope="module")
def tokenizers():
    return learn(300)


@pytest.fixture
def workdir(tmp_path, tokenizers):
    write_run(tmp_path / "run", EXPERIMENT, texts(), tokenizers)
    return tmp_path / "run"


def test_a_folder_without_a_run(tmp_path):
    assert not holds_run(tmp_path / "none", EXPERIMENT)


def test_another_configuration(workdir):
    other = ExperimentConfig(train=TrainConfig(seed=1))
    with pytest.raises(UserError, match=r"train\.seed: 0 in the run, 1 now"):
        holds_run(workdir, other)


def test_other_text(workdir):
    changed = texts(sources=["one two three", "four six", "six"])
    with pytest.raises(UserError, match=r"the train corpus \(train\.en\) is not the text"):
        check_texts(workdir, changed)


def save(workdir, *steps):
    with Checkpoints(workdir, keep_last=10) as checkpointer:
        for step in steps:
            params = {"kernel": jnp.full(2, step, jnp.float32)}
            state = TrainState(jnp.int32(step), params, ())
            checkpointer.save(step, state)


@pytest.fixture
def begun(workdir):
    """A run with a checkpoint and metrics."""
    save(workdir, 1)
    (workdir / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n')
    return workdir


def remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


OTHER = ExperimentConfig(train=TrainConfig(seed=1))


@pytest.mark.parametrize("also", [(), ("checkpoints",), ("metrics.jsonl", "checkpoints"),
                                  ("data.json", "checkpoints", "metrics.jsonl")])  # fmt: skip
def test_what_is_left_of_a_run_is_not_continued_as_another(begun, also):
    for name in ("config.json", *also):
        remove(begun / name)
    with pytest.raises(UserError, match=r"run whose config\.json is missing: .*another workdir"):
        holds_run(begun, OTHER)


@pytest.mark.parametrize("name", ["data.json", "tokenizer"])
def test_a_run_without_one_of_its_parts(begun, name):
    remove(begun / name)
    with pytest.raises(UserError, match=rf"holds a run whose {name} is missing: restore it"):
        holds_run(begun, EXPERIMENT)


@pytest.mark.parametrize("how", ["removed", "emptied", "elsewhere"])
def test_a_run_whose_checkpoints_are_gone(begun, how):
    remove(begun / "checkpoints")
    if how == "emptied":
        (begun / "checkpoints").mkdir()
    if how == "elsewhere":  # A disk that is not mounted.
        (begun / "checkpoints").symlink_to(begun / "disk")
    with pytest.raises(UserError, match="checkpoints holds no checkpoint, but the run has written"):
        holds_run(begun, EXPERIMENT)


def test_only_a_run_without_a_checkpoint_needs_the_same_start(workdir):
    other = ExperimentConfig(train=TrainConfig(init_from="runs/trained"))
    with pytest.raises(UserError, match=r"train\.init_from: '' in the run, 'runs/trained' now"):
        holds_run(workdir, other)
    save(workdir, 1)
    assert holds_run(workdir, other)


def test_a_start_that_was_killed_can_be_repeated(workdir, tokenizers, tmp_path, monkeypatch):
    """Wherever in writing the folder, and with any configuration."""
    files = {path.relative_to(workdir) for path in workdir.rglob("*") if path.is_file()}
    killed = [*range(len(files))]
    for number in killed:
        folder, written = tmp_path / f"killed-{number}", []

        def write(path, content, number=number, written=written):
            if len(written) == number:
                raise KeyboardInterrupt
            written.append(path)
            path.write_bytes(content)

        with monkeypatch.context() as patch:
            patch.setattr("flaxformer_mt.atomic.write_bytes", write)
            with pytest.raises(KeyboardInterrupt):
                write_run(folder, EXPERIMENT, texts(), tokenizers)
        (folder / "lock").touch()
        (folder / "cache").mkdir()
        assert not holds_run(folder, OTHER)
        write_run(folder, OTHER, texts(), tokenizers)
        assert holds_run(folder, OTHER)
        assert read_tokenizers(folder).source.fingerprint == tokenizers.source.fingerprint


def test_a_start_with_another_kind_of_vocabulary_leaves_no_files_of_the_first(
    workdir, tokenizers, tmp_path
):
    folder = tmp_path / "killed"
    fingerprints = {"tokenizer": tokenizers.fingerprints}
    run_folder.write_run(folder, OTHER, {"source.model": b"of a killed start"}, fingerprints)
    (folder / "config.json").unlink()
    (folder / "origin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="origin is a link: remove it, or give another folder"):
        write_run(folder, OTHER, texts(), tokenizers)
    (folder / "origin").unlink()
    write_run(folder, OTHER, texts(), tokenizers)
    names = [path.name for path in (folder / "tokenizer").iterdir()]
    assert names == [path.name for path in (workdir / "tokenizer").iterdir()]


def edit(path, group, name, value):
    values = json.loads(path.read_text())
    values[group][name] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [("model", "eos_id", 3), ("model", "position_base", 10001.0), ("optimizer", "beta1", 0.8)],
)
def test_a_changed_configuration_is_named_by_all_readers(begun, tmp_path, group, name, value):
    edit(begun / "config.json", group, name, value)
    message = rf"config\.json is damaged or was changed \({group}\.{name}: .* in the run"
    with pytest.raises(UserError, match=message):
        read_config(begun)
    with pytest.raises(UserError, match=message):
        holds_run(begun, EXPERIMENT)
    with pytest.raises(UserError, match=message):
        average_run(begun, tmp_path / "average", 1, "last")


def test_options_of_a_search_and_of_the_program_may_be_edited(begun):
    edit(begun / "config.json", "decode", "beam_size", 7)
    edit(begun / "config.json", "train", "num_steps", 7)
    edit(begun / "config.json", "data", "path", "elsewhere")
    edit(begun / "config.json", "parallel", "num_devices", 1)
    assert read_config(begun).decode.beam_size == 7


def test_a_flipped_bit_in_the_vocabulary_is_named(begun, tmp_path):
    (path,) = (begun / "tokenizer").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    message = rf"tokenizer/{path.name} differs .* is not the vocabulary that the run was"
    with pytest.raises(UserError, match=message):
        read_tokenizers(begun)
    for given in (begun, begun / "tokenizer", path, f"other.model,{path}"):
        with pytest.raises(UserError, match=message):
            Tokenizers.for_run([], DataConfig(tokenizer_path=str(given)))
    with pytest.raises(UserError, match=message):
        average_run(begun, tmp_path / "average", 1, "last")


def test_a_flipped_bit_in_data_json_is_named_or_has_no_effect(begun):
    path = begun / "data.json"
    content, values = path.read_bytes(), json.loads(path.read_bytes())
    unnoticed = []
    for position in range(0, len(content), 61):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            restore_params(begun)
        except UserError as error:
            unnoticed += [] if "data.json" in str(error) else [error]
        else:
            unnoticed += [] if json.loads(changed) == values else [position]
    assert not unnoticed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "the run has format 2, and this version of flaxformer_mt reads format 1"),
        (
            {"files": {"a": {"bytes": "3", "sha256": ""}}},
            r"files\[...\].bytes: expected an integer",
        ),
        ({"unknown": 1}, "its checksum is that of other content"),
        ("", "damaged"),
    ],
)
def test_other_content_of_data_json_is_named(workdir, changes, reason):
    path = workdir / "data.json"
    path.write_text(changes and json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=rf"data\.json.*{reason}"):
        read_config(workdir)


def test_a_converted_model_is_checked_as_well(tmp_path, tokenizers):
    folder = tmp_path / "run"
    write_run(folder, EXPERIMENT, {}, tokenizers, {"settings.json": b"{}"})
    write_params(folder, 0, {"kernel": jnp.zeros(2)})
    assert read_origin(folder) == {"settings.json": b"{}"}
    assert read_fingerprints(folder) is None
    assert average_run(folder, tmp_path / "average", 1, "last") == [0]
    assert read_origin(tmp_path / "average") == {"settings.json": b"{}"}
    (folder / "origin" / "settings.json").write_bytes(b"[]")
    with pytest.raises(UserError, match=r"origin/settings\.json differs"):
        read_origin(folder)
