"""An experiment as a script runs it."""

import dataclasses
import errno
import io
import os
import signal

import chex
import jax
import numpy as np
import pytest

import flaxformer_mt
from flaxformer_mt import distributed, experiment
from flaxformer_mt.config import (
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.data import run_text
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment.checks import check_config
from flaxformer_mt.experiment.report import export_obstacles, report
from flaxformer_mt.runs import folder as run_folder
from flaxformer_mt.trained_model import load_run
from flaxformer_mt.training.hooks import Hooks, SavedFirst, StepInfo

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
def begun(tmp_path_factory):
    """A run folder that is written before the first step."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    with experiment.open_folder(folder):
        experiment.prepare(CONFIG, folder)
    return folder


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_a_run_in_float64_needs_it_enabled(tmp_path, name):
    refused = with_changes(CONFIG, {"model": {name: "float64"}})
    with pytest.raises(UserError, match=rf"model\.{name}=float64: .* JAX_ENABLE_X64=1"):
        flaxformer_mt.train(refused, tmp_path / "run")


@pytest.mark.slow
def test_a_run_without_a_whole_checkpoint_begins_again_from_where_it_was_started(tmp_path):
    run = flaxformer_mt.train(CONFIG, tmp_path / "run")
    config = with_changes(CONFIG, {"train": {"init_from": str(run.folder), "num_steps": 1}})
    tuned = flaxformer_mt.train(config, tmp_path / "tuned")
    params = load_run(tuned.folder, "last").params
    for checkpoint in (tuned.folder / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_text("{}")
    elsewhere = with_changes(config, {"train": {"init_from": str(tmp_path / "removed")}})
    again = flaxformer_mt.train(elsewhere, tuned.folder)
    chex.assert_trees_all_equal(load_run(again.folder, "last").params, params)
    assert again.config.train.init_from == str(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_interrupted_saves_first(tmp_path, number):
    config = with_changes(CONFIG, {"train": {"num_steps": 50, "log_every": 1, "eval_every": 50}})
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def send(info):
        if info.step == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        flaxformer_mt.train(config, tmp_path / "run", hooks=hooks_of(send))
    assert 3 <= flaxformer_mt.Run(tmp_path / "run").latest_step < 50
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
def test_training_goes_on_without_standard_output(tmp_path, monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("sys.stdout", Closed())
    run = flaxformer_mt.train(CONFIG, tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("standard output cannot be written (Broken pipe): training goes on")
    assert (run.latest_step, len(run.metrics("test"))) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"r_drop": 5.0}, "model": {"dropout_rate": 0.0}}, "train.r_drop=5.0 has no"),
        (
            {"data": {"hold_out": 5, "test_split": "", "valid_corpora": (CorpusConfig(),)}},
            "data.hold_out=5 has no effect",
        ),
        (
            {"data": {"subword_sampling": 0.1}, "model": {"has_inputs": False}},
            "data.subword_sampling=0.1 has no effect",
        ),
        (
            {"optimizer": {"total_steps": 50}},
            "total_steps=50 has no effect with optimizer.schedule=inverse_square_root",
        ),
        (
            {"model": {"source_vocab_size": 100, "target_vocab_size": 100}},
            "model.source_vocab_size=100 is less than the [0-9]+ tokens of the vocabulary",
        ),
    ],
)
def test_options_that_others_make_ineffective_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        flaxformer_mt.train(with_changes(CONFIG, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def hooks_of(*functions, every=1):
    hooks = Hooks()
    for function in functions:
        hooks.add_hook(function, every=every)
    return hooks


def info_of(step, is_last=False):
    return StepInfo(step, None, {}, {}, is_last)


def test_hooks_are_called_every_so_many_steps_and_after_the_last():
    hooks, seen = Hooks(), []

    @hooks.add_hook(every=3)
    def third(info):
        seen.append(info.step)

    hooks.add_hook(lambda info: info.step == 4)
    assert [hooks(info_of(step, step == 5)) for step in range(1, 6)] == [False] * 3 + [True, False]
    assert seen == [3, 5]
    with pytest.raises(UserError, match="every=0: must be at least 1"):
        hooks.add_hook(third, every=0)


def test_what_a_hook_raises_waits_until_the_run_is_saved():
    def fail(info):
        raise ZeroDivisionError

    failing = SavedFirst(hooks_of(fail), agree=bool, agree_every=1)
    assert failing(info_of(1))
    with pytest.raises(ZeroDivisionError):
        failing.finish()
    undecided = SavedFirst(hooks_of(lambda info: "stop"), agree=bool, agree_every=1)
    assert undecided(info_of(1))
    with pytest.raises(TypeError, match="must return True to stop the run, or False or None, not"):
        undecided.finish()


def test_several_processes_stop_after_the_same_step():
    asked = []

    def agree(flag):
        asked.append(flag)
        return True

    own = SavedFirst(hooks_of(lambda info: info.step == 1), agree, agree_every=2)
    other = SavedFirst(hooks_of(lambda info: None), agree, agree_every=2)
    assert [[each(info_of(step)) for each in (own, other)] for step in (1, 2)] == [
        [False, False], [True, True]
    ]  # fmt: skip
    assert asked == [True, False]
    with pytest.raises(UserError, match="a hook failed in another process"):
        other.finish()


def test_a_folder_that_processes_do_not_share_is_refused(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    monkeypatch.setattr(run_folder, "_SHARED_SECONDS", 0)
    experiment.prepare(CONFIG, begun)
    with pytest.raises(UserError, match="does not see what process 0 has written there"):
        experiment.prepare(CONFIG, tmp_path / "local")


@pytest.mark.parametrize(
    ("processes", "parallel", "message"),
    [
        (1, {"num_devices": 99}, r"parallel\.num_devices=99, but there are only 8"),
        (
            1,
            {"num_devices": 8, "fsdp": 3},
            r"parallel\.num_devices: 8 devices .* fsdp=3 times",
        ),
        (
            1,
            {"num_devices": 8, "tensor": 4},
            r"model\.num_heads=2 cannot be .* among 4",
        ),
        (
            1,
            {"num_devices": 8, "tensor": 1},
            r"the 4 rows .* 8 devices .* parts .*multiple of 512",
        ),
        (2, {"num_devices": 8, "strategy": "pmap"}, r"strategy=pmap is for one process, and there"),
    ],
)
def test_devices_that_cannot_share_a_run_are_refused(monkeypatch, processes, parallel, message):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_device_count", lambda: 8 // processes)
    with pytest.raises(UserError, match=message):
        check_config(changed(parallel=parallel))


@pytest.mark.slow
def test_hooks_see_state_and_metrics_and_may_stop_a_run(tmp_path):
    config = changed(train={"num_steps": 4, "log_every": 1, "eval_every": 2})
    seen = []

    def watch(info):
        seen.append((info.step, *info.metrics))
        assert np.isfinite(info.metrics["train"]["loss"])
        assert int(info.state.step) == info.step
        total, weight = info.sums["loss"]
        assert float(total / weight) == pytest.approx(info.metrics["train"]["loss"])
        return info.step == 1

    def fail(info):
        if "valid" in info.metrics:
            raise ZeroDivisionError("of the user's")

    def train(*functions):
        return flaxformer_mt.train(config, tmp_path / "run", hooks=hooks_of(*functions))

    run = train(watch)
    assert (seen, run.latest_step) == ([(1, "train")], 1)
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        train(watch, fail)
    assert (seen[1:], run.latest_step) == ([(2, "train", "valid")], 2)
    train(lambda info: seen.append(info.step))
    assert (seen[2:], run.latest_step) == ([3, 4], 4)


@pytest.mark.slow
@pytest.mark.parametrize("total_steps", [0, 10])
def test_a_run_that_is_continued_for_longer_keeps_its_warm_up(tmp_path, total_steps):
    optimizer = {"warmup": 0.5, "total_steps": total_steps, "schedule": "inverse_square_root"}
    first = changed(optimizer=optimizer)
    flaxformer_mt.train(first, tmp_path / "run")
    for num_steps in (4, 8):
        longer = changed(optimizer=optimizer, train={"num_steps": num_steps})
        parts = experiment.prepare(longer, tmp_path / "run")
        expected = experiment.Experiment(experiment.begin(first, tmp_path / "other"))
        rates = [[float(each.schedule(count)) for count in range(8)] for each in (parts, expected)]
        assert rates[0] == rates[1]
    # What was given is kept as it was given, and can be taken for another run.
    assert load_run(tmp_path / "run").config.optimizer == first.optimizer
    with pytest.raises(UserError, match=r"optimizer\.warmup: 0\.5 in the run, 0\.25 now"):
        flaxformer_mt.train(changed(optimizer=optimizer | {"warmup": 0.25}), tmp_path / "run")


@pytest.mark.parametrize("is_new", [True, False])
def test_a_refused_start_removes_what_it_wrote_and_nothing_else(tmp_path, is_new):
    folder = tmp_path / "run"
    if not is_new:
        (folder / "tensorboard").mkdir(parents=True)

    def refused():
        (folder / "cache").mkdir()
        (folder / "cache/store").write_text("tokens")
        (folder / "data.json").write_text("{}")
        (folder / "notes.txt").write_text("of another program")
        raise UserError("why")

    with pytest.raises(UserError, match="why"), experiment.open_folder(folder):
        refused()
    left = {"notes.txt"} if is_new else {"notes.txt", "tensorboard"}
    assert {path.name for path in folder.iterdir()} == left


def test_files_that_a_run_does_not_list_are_never_replaced(tmp_path):
    for name in ("origin", "tokenizer"):
        folder = tmp_path / name
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("mine")
        with pytest.raises(UserError, match=f"holds {name} of a run whose config.json is missing"):
            experiment.begin(CONFIG, folder)
        assert (folder / name / "mine.txt").read_text() == "mine"


def test_one_resolved_configuration_reaches_all_parts(begun, tmp_path):
    """The run folder keeps the configuration as it was given."""
    parts = experiment.Experiment(experiment.begin(CONFIG, str(tmp_path)))
    vocab_size = parts.dataset.tokenizers.source.vocab_size
    assert parts.config.model.source_vocab_size == vocab_size
    assert parts.config.data.source_row_length == parts.dataset.training.shapes[0].source_length
    assert run_folder.read_config(begun).model.source_vocab_size == 0
    # The start of a run names the possible exports, a dry run also what prevents the others.
    assert dict(report(parts))["exports"] == "ctranslate2, jax; not marian, marian-native"
    reasons = [line for _, line in export_obstacles(parts)]
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
        (
            {"decode": {"copy_unknown": True, "alignment_layer": 3}},
            "decode.alignment_layer=3: the decoder has 1 layers",
        ),
        ({"train": {"init_from": "absent"}}, "train.init_from=absent: there is no such file"),
        (
            {"train": {"init_from": "absent"}, "data": {"tokenizer_path": "absent"}},
            "train.init_from=absent: there is no such file",
        ),
        ({"train": {"freeze": ("embeding",)}}, "train.freeze: 'embeding' matches no parameter"),
    ],
)
def test_what_options_name_is_checked_before_anything_long(
    tmp_path, monkeypatch, start, groups, message
):
    def no_tokens(*arguments, **options):
        raise AssertionError("the corpus was tokenized")

    monkeypatch.setattr(run_text, "open_dataset", no_tokens)
    with pytest.raises(UserError) as caught:
        start(changed(**groups), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
