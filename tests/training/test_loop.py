"""The training loop: metrics, exact continuation, early stopping, non-finite steps."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_mt import distributed
from flaxformer_mt.data.stream.training_stream import Prefetched
from flaxformer_mt.errors import UserError
from flaxformer_mt.interruption import Interrupted
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params, whole_checkpoints
from flaxformer_mt.runs.metrics_file import read_metrics
from flaxformer_mt.training.loop import early_stop, train
from flaxformer_mt.training.reporting.metrics import MEASUREMENTS, JsonLinesWriter, validate
from flaxformer_mt.training.reporting.progress import Progress


@dataclasses.dataclass
class Run:
    """Trains the tiny experiment in a folder; each call starts a new "process"."""

    tiny: object
    folder: object
    options: dict = dataclasses.field(default_factory=dict)
    state: object = None
    announced: list = dataclasses.field(default_factory=list)
    rows_read: list = dataclasses.field(default_factory=list)

    def __call__(
        self, batch=None, evaluate=None, train_step=None, should_stop=lambda step: False, **options
    ):
        config = dataclasses.replace(self.tiny.experiment.train, **self.options | options)
        batch = batch or self.tiny.placed_batch
        evaluate = evaluate or self.evaluate
        self.folder.mkdir(exist_ok=True)

        def read(position):
            self.rows_read.append(position.row)
            return batch(position.row), position._replace(row=position.row + 1)

        with Checkpoints(
            self.folder, config.keep_last, config.keep_best, config.best_metric
        ) as checkpointer:
            state, progress = self.tiny.state(), Progress()
            if checkpointer.latest_step() is not None:
                state, saved = checkpointer.restore_or(state, {})
                progress = Progress.from_json(saved)
            writer = JsonLinesWriter(self.folder / "metrics.jsonl")
            writer.rewind(int(state.step))
            self.state = train(
                state,
                progress,
                train_step=train_step or self.tiny.train_step,
                stream=functools.partial(Prefetched, read),
                evaluate=evaluate,
                schedule=self.tiny.schedule,
                checkpointer=checkpointer,
                writers=[writer],
                config=config,
                devices=self.tiny.devices.devices,
                hooks=lambda info: should_stop(info.step),
            )
            if why := early_stop(progress, config):
                self.announced.append(why)
        return self

    def evaluate(self, params, step):
        return validate(self.tiny.eval_step, params, [self.tiny.placed_batch(1000)])

    @property
    def lines(self):
        """The metrics that were written, but for those of time."""
        return [
            {name: value for name, value in line.items() if name not in MEASUREMENTS}
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]

    @property
    def steps(self):
        return [(line["step"], line["split"]) for line in self.lines]

    @property
    def checkpoints(self):
        return sorted(whole_checkpoints(self.folder))


@pytest.fixture
def runs(setup, tmp_path):
    """Call `runs(name, ...)` for a run folder of a tiny experiment."""

    def of(name="run", **options):
        # Runs share a compiled step unless it has other options.
        of_loop = {option: options.pop(option) for option in OF_LOOP & options.keys()}
        return Run(setup.of(**{"bigram": True, **options}), tmp_path / name, of_loop)

    return of


OF_LOOP = {
    "log_every", "eval_every", "checkpoint_every", "keep_best", "early_stopping_patience",
    "early_stopping_metric", "early_stopping_min_delta", "max_skipped_steps",
}  # fmt: skip


def power_cut(step, tiny):
    """A stream of batches that ends the process when that of `step` (from 0) is wanted."""

    def batch(row):
        if row == step:
            raise KeyboardInterrupt
        return tiny.placed_batch(row)

    return batch


@pytest.mark.slow_except("mesh")
@pytest.mark.parametrize("strategy", ["mesh", "pmap"])
def test_a_run_that_was_stopped_goes_on_exactly(runs, strategy):
    # With dropout and a moving average, random numbers and the average have to go on as well.
    options = {
        "strategy": strategy,
        "num_devices": 2,
        "model": {"dropout_rate": 0.1},
        "ema_decay": 0.9,
        "log_every": 4,  # amid which the run will stop
    }
    whole, stopped = runs("whole", **options)(), runs("stopped", **options)
    with pytest.raises(KeyboardInterrupt):
        stopped(batch=power_cut(5, stopped.tiny))
    assert stopped.steps == [(3, "valid"), (4, "train")]
    assert stopped.checkpoints == [3]
    stopped.rows_read.clear()

    stopped()
    assert stopped.rows_read[:3] == [3, 4, 5]
    chex.assert_trees_all_equal(*jax.device_get([whole.state, stopped.state]))
    assert stopped.lines == whole.lines
    assert stopped.steps == [(3, "valid"), (4, "train"), (6, "train"), (6, "valid")]
    assert restore_params(stopped.folder, "last")[0] == 6


def test_a_run_that_was_asked_to_stop_saves_and_goes_on_exactly(runs):
    whole, stopped = runs("whole", keep_best=0)(), runs("stopped", keep_best=0)
    with pytest.raises(Interrupted, match=r"stopped after step 5; .* continues after step 5$"):
        stopped(should_stop=lambda step: step == 5)
    assert stopped.checkpoints == [3, 5]
    stopped.rows_read.clear()
    stopped()
    assert stopped.rows_read[0] == 5
    chex.assert_trees_all_equal(*jax.device_get([whole.state, stopped.state]))
    assert stopped.lines == whole.lines


def test_processes_wait_for_the_checkpoint_of_an_interruption(runs, monkeypatch):
    run, waiting = runs(), []
    monkeypatch.setattr(distributed, "barrier", lambda name: waiting.append(run.checkpoints))
    with pytest.raises(Interrupted):
        run(should_stop=lambda step: step == 5)
    assert waiting == [[3, 5]]


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(runs):
    whole, damaged = runs("whole")(), runs("damaged")
    with pytest.raises(KeyboardInterrupt):
        damaged(batch=power_cut(4, damaged.tiny), checkpoint_every=1)
    (damaged.folder / "checkpoints" / "4" / "manifest.json").unlink(missing_ok=True)
    (damaged.folder / "checkpoints" / "3" / "manifest.json").unlink()
    damaged(checkpoint_every=1)
    chex.assert_trees_all_equal(*jax.device_get([whole.state, damaged.state]))
    assert damaged.lines == whole.lines


def test_a_run_may_change_devices_and_strategy_when_it_goes_on(setup, tmp_path):
    moved, unmoved = tmp_path / "moved", tmp_path / "unmoved"
    Run(setup.of("mesh", 8, bigram=True), moved)(num_steps=3)
    moved = Run(setup.of("pmap", 2, bigram=True), moved)(num_steps=6)
    unmoved = Run(setup.of(bigram=True), unmoved)(num_steps=6)
    chex.assert_trees_all_close(
        jax.device_get(moved.state.params), jax.device_get(unmoved.state.params), atol=1e-5, rtol=0
    )


def test_lines_of_metrics(runs):
    run = runs()()
    assert run.steps == [(2, "train"), (3, "valid"), (4, "train"), (6, "train"), (6, "valid")]
    for line in read_metrics(run.folder / "metrics.jsonl"):
        assert 0 < line["loss"] < 5
        assert 0 <= line["accuracy"] <= 1
        if line["split"] == "valid":
            assert line["perplexity"] == pytest.approx(math.exp(line["cross_entropy"]))
            continue
        assert line["compilations"] == 1
        assert line["target_tokens_per_second"] > 0
        assert 0 <= line["data_wait_fraction"] < 1
        assert line["gradient_norm"] > 0
        assert 0 < line["padding_fraction"] < 1
        assert line["skipped_steps"] == 0
        # The rate of the update that ended the step: t is the step.
        rate = 1e-2 * min(line["step"] / 4, math.sqrt(4 / line["step"]))
        assert line["learning_rate"] == pytest.approx(rate)


def test_a_finished_run_is_left_alone(runs):
    run = runs()()
    state = jax.device_get(run.state)
    files = {path: path.stat().st_mtime_ns for path in (run.folder / "checkpoints").rglob("*")}
    before = (run.folder / "metrics.jsonl").read_text()
    run.rows_read.clear()
    run()
    assert not run.rows_read
    chex.assert_trees_all_equal(jax.device_get(run.state), state)
    assert (run.folder / "metrics.jsonl").read_text() == before
    assert files == {path: path.stat().st_mtime_ns for path in files}


def losses(*values):
    """An `evaluate` that gives these losses, the first after step 1."""
    return lambda params, step: {"loss": values[step - 1], "bleu": -values[step - 1]}


@pytest.mark.slow_except("3")
@pytest.mark.parametrize("stop", [None, 3])
def test_training_stops_early_when_validations_do_not_improve(runs, stop):
    run = runs(eval_every=1, checkpoint_every=2, early_stopping_patience=2)
    evaluate = losses(4.0, 3.0, 3.5, math.nan, 1.0, 1.0)
    if stop:  # the patience that is left comes back
        with pytest.raises(Interrupted):
            run(evaluate=evaluate, should_stop=lambda step: step == stop)
    run(evaluate=evaluate)
    assert run.steps[-1] == (4, "valid")
    (line,) = run.announced
    assert "loss has not improved in 2 validations" in line
    # What it stopped with is saved; to start again changes nothing but the patience does.
    assert int(run.state.step) == 4
    assert run.checkpoints[-1] == 4
    run(evaluate=evaluate)
    assert len(run.announced) == 2
    assert int(run.state.step) == 4
    run(evaluate=evaluate, early_stopping_patience=3)
    assert int(run.state.step) == 6


def test_what_counts_as_an_improvement(runs):
    run = runs(
        eval_every=1,
        early_stopping_patience=2,
        early_stopping_metric="bleu",
        early_stopping_min_delta=0.5,
    )
    run(evaluate=losses(4.0, 3.0, 2.75, 2.625, 1.0, 1.0))
    assert int(run.state.step) == 4


def test_early_stopping_needs_its_figure(runs):
    run = runs(early_stopping_patience=2, early_stopping_metric="bleu")
    with pytest.raises(UserError, match=r"train\.early_stopping_metric=bleu, but.* accuracy, "):
        run()


def spoiled(tiny, rows, part="loss"):
    """Batches of which those of `rows` make the loss (or its gradient only) infinite."""

    def batch(row):
        batch = tiny.placed_batch(row)
        if row not in rows:
            return batch
        factor = jnp.float32(jnp.nan if part == "loss" else 3e38)
        return dataclasses.replace(batch, decoder_loss_weights=batch.decoder_loss_weights * factor)

    return batch


def test_a_step_that_is_not_finite_is_skipped_and_counted(runs):
    run = runs(checkpoint_every=1, keep_best=0)
    run(batch=spoiled(run.tiny, {3, 4}))
    counts = {line["step"]: line["skipped_steps"] for line in run.lines if line["split"] == "train"}
    assert counts == {2: 0, 4: 1, 6: 1}
    assert all(math.isfinite(line["loss"]) for line in run.lines)
    assert run.lines[-2]["learning_rate"] == pytest.approx(1e-2)  # four steps counted
    # Amid skipped steps no checkpoint is written.
    assert run.checkpoints == [1, 2, 3, 6]


def test_after_many_skipped_steps_the_run_goes_back_and_stops(runs):
    run = runs(log_every=1, max_skipped_steps=2)
    with pytest.raises(
        UserError,
        match=r"^the loss was not finite in steps 5 to 6 \(train\.max_skipped_steps=2\), so the "
        rf"run stopped and is back at step 3: .*learning_rate.*train\.init_from={run.folder} ",
    ):
        run(batch=spoiled(run.tiny, {4, 5, 6, 7}), num_steps=8)
    assert run.checkpoints == [3]
    assert run.steps[-2:] == [(3, "train"), (3, "valid")]
    # With the right batches the run goes on.
    run(num_steps=8)
    assert int(run.state.step) == 8


def test_without_a_checkpoint_a_run_goes_back_to_the_start(runs):
    run = runs(log_every=1, max_skipped_steps=3)
    with pytest.raises(UserError, match=r"steps 1 to 3 .* back at step 0: .*clip_norm=1$"):
        run(batch=spoiled(run.tiny, range(10)))
    assert run.lines == []


def test_no_checkpoint_holds_parameters_that_are_not_finite(runs):
    overflowing = {"kind": "adamw", "weight_decay": 1e6, "learning_rate": 1e6}
    run = runs(
        optimizer={**overflowing, "schedule": "constant"}, checkpoint_every=1, max_skipped_steps=2
    )
    with pytest.raises(UserError, match=r"^the update was not finite in steps "):
        run(num_steps=12)
    assert run.checkpoints
    for step in run.checkpoints:
        _, params = restore_params(run.folder, step)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(params)))


def test_a_validation_that_fails_does_not_lose_the_steps_before_it(runs):
    def evaluate(params, step):
        raise RuntimeError("out of memory")

    whole, failed = runs("whole")(), runs("failed")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            failed(evaluate=evaluate)
        assert failed.checkpoints == [3]
        assert failed.steps == [(2, "train")]
    failed()
    chex.assert_trees_all_equal(*jax.device_get([whole.state, failed.state]))
    assert failed.lines == whole.lines
    assert failed.checkpoints == whole.checkpoints


def test_an_exception_of_the_stream_ends_the_run(runs):
    run = runs()

    def broken(row):
        raise UserError("no more text")

    with pytest.raises(UserError, match="no more text"):
        run(batch=broken)
