"""What is said about a run before its first step; a dry run says all of it, and ends there."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.pair_fields import TEXT
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.experiment import checks
from flaxformer_mt.experiment.fit import Experiment
from flaxformer_mt.experiment.start import begin, recorded
from flaxformer_mt.interop.exports import exports, summary
from flaxformer_mt.runs import atomic
from flaxformer_mt.training.devices import RULES_OPTION
from flaxformer_mt.training.memory import abstract_batch, step_cost
from flaxformer_mt.training.parameters import describe
from flaxformer_mt.training.reporting.console import make_console, print_labelled
from flaxformer_mt.training.sharding import check_rules


def report(parts: Experiment) -> Iterator[tuple[str, str]]:
    """Yields the lines at the start of a run, each with its label."""
    config = parts.config
    yield from parts.dataset.report()
    params = parts.state_shapes.params
    yield (
        "model",
        f"{describe(params, config.train.freeze, config.model)}, {config.model.dtype}",
    )
    epochs = config.train.num_steps / parts.dataset.training.batches_per_epoch
    yield "steps", f"{config.train.num_steps:,}, which are {epochs:,.1f} epochs"
    if config.train.label_smoothing:
        smoothing = f"with label smoothing of {config.train.label_smoothing:g}"
        yield "loss", f"{smoothing}; the perplexity is exp(loss) without it"
    yield "exports", summary(config.model, parts.dataset.tokenizers.has_sentencepiece)
    mesh = parts.devices.mesh
    axes = " x ".join(f"{size} {axis}" for axis, size in mesh.shape.items())
    yield "devices", f"{mesh.size} {parts.devices.devices[0].platform} ({axes})"
    with prefixed(RULES_OPTION):
        uneven = check_rules(params, mesh.shape, parts.devices.rules)
    yield from (("sharding", line) for line in uneven)


def export_obstacles(parts: Experiment) -> Iterator[tuple[str, str]]:
    """Yields what prevents an export to each other format."""
    has_sentencepiece = parts.dataset.tokenizers.has_sentencepiece
    for name, obstacle in exports(parts.config.model, has_sentencepiece).items():
        if obstacle:
            yield "exports", f"not {name}: {obstacle}"


def costs(parts: Experiment) -> Iterator[tuple[str, str]]:
    """Compiles the training step for each shape, and yields what it needs per device."""
    step, state = parts.compiled_step, parts.state_shapes
    has_inputs = parts.config.model.has_inputs
    fields = [name for name in parts.dataset.training.corpora[0].fields if name != TEXT]
    for shape in parts.dataset.training.shapes:
        batch = parts.devices.abstract_batch(abstract_batch(shape, has_inputs, fields))
        cost = step_cost(step.lower(state, batch).compile(), state, batch)
        rows = f"{shape.rows} x {shape.source_length} and {shape.target_length} tokens"
        yield "step", f"one compilation for {rows}: {cost}"


def dry_run(
    config: ExperimentConfig,
    workdir: str | Path,
    console: Console | None = None,
    accept_changes: bool = False,
) -> None:
    """Checks an experiment and prints what would be trained, without writing anything.

    Errors as in `train`, except that too little memory is only printed: the run may be meant for
    another machine.
    """
    workdir, console = Path(workdir), console or make_console()
    checks.check_one_process("--dry-run")
    config = recorded(config)
    checks.check_config(config)
    atomic.require_writable(workdir)
    with atomic.temporary_folder() as cache:
        start = begin(config, workdir, cache=cache, accept_changes=accept_changes)
        parts = Experiment(start)
        parts.make()
        print_labelled(report(parts), console)
        print_labelled(export_obstacles(parts), console)
        try:
            checks.check_memory(parts.config)
        except UserError as error:
            console.print(f"memory   {error}: training would be refused here")
        print_labelled(costs(parts), console)
