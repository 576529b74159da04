"""Trains an experiment in its run folder, and evaluates it on its test set."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import jax
from rich.console import Console

from flaxformer_mt import distributed
from flaxformer_mt.config import TrainConfig, to_dict
from flaxformer_mt.data.dataset import EvaluationSet
from flaxformer_mt.decoding.translator import into_languages
from flaxformer_mt.errors import UserError
from flaxformer_mt.experiment import continuation
from flaxformer_mt.experiment.parts import Experiment
from flaxformer_mt.interruption import Interrupted, Interruption
from flaxformer_mt.memory_limits import explained_exhaustion
from flaxformer_mt.runs import changes
from flaxformer_mt.runs.checkpoint import Checkpoints, restore_params
from flaxformer_mt.runs.layout import METRICS
from flaxformer_mt.standard_output import BestEffortOutput
from flaxformer_mt.training import loop
from flaxformer_mt.training.devices import place
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting import notebook
from flaxformer_mt.training.reporting.callbacks import Callback, Callbacks
from flaxformer_mt.training.reporting.console import ConsoleWriter, Sample, print_labelled
from flaxformer_mt.training.reporting.metrics import JsonLinesWriter, Writer
from flaxformer_mt.training.reporting.progress import Progress
from flaxformer_mt.training.reporting.trackers import BY_NAME, Tracker, Trackers, system_facts
from flaxformer_mt.training.state import TrainState

_LESS_MEMORY = (
    "set model.remat=full, or parallel.fsdp with several devices; a new run can also have more "
    "train.accumulation_steps or a lower train.batch_tokens"
)


def make_console(file: BestEffortOutput | None = None) -> Console:
    """Returns a console for the progress of a run; quiet in all processes but the first.

    In a notebook it prints plain lines, which become one output: Rich would show each line as an
    output of its own. The steps are another, which is updated (`notebook.py`).
    """
    in_notebook = notebook.is_notebook()
    return Console(
        file=cast(TextIO, file),
        highlight=False,
        markup=False,
        force_jupyter=False,
        force_terminal=False if in_notebook else None,
        soft_wrap=True,
        quiet=not distributed.is_main(),
    )


def default_writers(config: TrainConfig, workdir: Path, console: Console) -> list[Writer | Tracker]:
    """Returns the writer of `metrics.jsonl`, and the trackers of a configuration."""
    chosen = [BY_NAME[name]() for name in dict.fromkeys(config.trackers)]
    return [JsonLinesWriter(workdir / METRICS, console.print), *chosen]


def fit(
    experiment: Experiment,
    workdir: str | Path,
    console: Console | None = None,
    interruption: Interruption | None = None,
    writers: Sequence[Writer | Tracker] | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Trains from the newest checkpoint, or from the start, and writes checkpoints and metrics.

    Arguments and errors as of `train`; `writers` are by default the `default_writers`, and the
    console comes in addition.
    """
    config, console = experiment.config.train, console or make_console()
    workdir = Path(workdir)
    in_notebook = notebook.is_notebook()
    display = ConsoleWriter(
        config.num_steps,
        Console(quiet=True) if in_notebook else console,
        experiment.dataset.training.batches_per_epoch,
    )
    if writers is None:
        writers = default_writers(config, workdir, console)
    is_main, devices = distributed.is_main(), experiment.devices.devices
    own = [each for each in writers if isinstance(each, Tracker) and is_main]
    own += [notebook.NotebookProgress()] if in_notebook else []
    tracking = Trackers(own, console.print)
    untracked = [each for each in writers if not isinstance(each, Tracker)]

    def validated(params: Params, step: int) -> dict[str, Any]:
        display.validating()
        metrics, samples = experiment.validation.validate(params)
        display.translated(samples)
        tracking.tell("translated", step, samples)
        return metrics

    several = jax.process_count() > 1
    watching = Callbacks(callbacks, distributed.agree, config.log_every if several else 1)
    with (
        explained_exhaustion("training", _LESS_MEMORY),
        Checkpoints(
            workdir, config.keep_last, config.keep_best, config.best_metric, console.print
        ) as checkpointer,
    ):
        latest = checkpointer.latest_step()
        history = changes.read(workdir)
        pending = [] if latest is None else [each for each in history if each["step"] >= latest]
        if latest is None:
            state = experiment.initial_state(console.print)
        else:
            earlier = changes.before(experiment.config, pending) if pending else None
            state = experiment.abstract_state(earlier)
        for line in _announced(pending, state, experiment):
            console.print(line)

        def adapt(state: TrainState, progress: Progress) -> tuple[TrainState, Progress]:
            if not pending:
                return state, progress
            like = experiment.abstract_state()
            state = continuation.adapted_state(state, like, experiment.optimizer, config.freeze)
            return state, continuation.adapted_progress(progress, pending)

        train_step = experiment.compile_train_step()
        train_step.on_compile = display.compiling
        with (
            contextlib.nullcontext(lambda step: False)
            if interruption is None
            else interruption.deferred(distributed.agree if several else None, config.log_every)
        ) as is_interrupted:
            try:
                facts = to_dict(experiment.config) | {"system": system_facts(devices)}
                tracking.tell("begin", workdir, facts)
                loop.train(
                    state,
                    train_step=train_step,
                    stream=experiment.stream,
                    evaluate=validated,
                    schedule=experiment.schedule,
                    checkpointer=checkpointer,
                    writers=[*untracked, tracking, display, watching] if is_main else (),
                    config=config,
                    devices=devices,
                    # Both are asked after every step, because processes have to agree on each.
                    should_stop=lambda step: any(
                        [is_interrupted(step), watching.should_stop(step)]
                    ),
                    announce=console.print,
                    on_step=display.advance,
                    adapt=adapt,
                    changes=continuation.missing_lines(workdir, history, latest or 0),
                )
            except Interrupted as interrupted:
                if not watching.is_stopping:
                    raise
                console.print(f"by a callback, {interrupted}")
            # While signals are still deferred.
            checkpointer.wait()
            watching.finish()


def _announced(
    pending: Sequence[Mapping[str, Any]], state: TrainState, experiment: Experiment
) -> Iterator[str]:
    """Yields what is said about changes after the newest checkpoint, whose shapes are `state`."""
    for entry in pending:
        yield f"changed after step {entry['step']:,}: {changes.described(entry)}"
    if continuation.begins_epoch(pending):
        yield "the data begin with a new epoch"
    if pending and not continuation.keeps_optimizer(state, experiment.state_shapes):
        yield "the optimizer's state begins anew, but for its count of updates"


def evaluate_test(
    experiment: Experiment, workdir: str | Path, show_progress: bool = False
) -> tuple[int, list[str], dict[str, Any]]:
    """Evaluates the best checkpoint on the test corpus, and writes the metrics.

    Returns the checkpoint's step, the translations (a language model has none), and the metrics.
    """
    test = experiment.dataset.test
    if test is None:
        raise UserError("data.test_split is empty: there is nothing to test on")
    validation = experiment.validation
    step, params = restore_params(workdir, "best")
    hypotheses: list[str] = []
    devices = experiment.devices
    metrics = validation.measure("test", place(params, devices.mesh, devices.rules))
    if experiment.config.model.has_inputs:
        sentences, (references,) = into_languages(
            test.texts.sources, [test.texts.targets], experiment.dataset.tokenizers.target
        )
        hypotheses = validation.translate(params, sentences, show_progress)
        metrics |= validation.quality(hypotheses, references)
    if distributed.is_main():
        JsonLinesWriter(Path(workdir, METRICS)).write(step, "test", metrics)
    return step, hypotheses, metrics


def print_test(
    experiment: Experiment, workdir: Path, test: EvaluationSet, console: Console
) -> None:
    """Evaluates the best checkpoint on the test corpus, and prints metrics and translations."""
    step, hypotheses, metrics = evaluate_test(experiment, workdir, console.is_terminal)
    head = f"test ({test.texts.name}), best checkpoint (step {step:,}): loss {metrics['loss']:.4f}"
    if not experiment.config.model.has_inputs:
        console.print(f"\n{head}, perplexity {metrics['perplexity']:.2f}")
        return
    texts = zip(test.texts.sources, hypotheses, test.texts.targets, strict=True)
    for each in itertools.islice(texts, experiment.config.train.show_translations):
        console.print()
        print_labelled(Sample(*each).rows(), console, width=12)
    console.print(
        f"\n{head}, BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}  "
        f"[{metrics['bleu_signature']}]",
        soft_wrap=not console.is_terminal,  # Terminals would break lines within words.
    )
