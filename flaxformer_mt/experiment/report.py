"""What is said about a run before its first step and after its last; a dry run ends in between."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from flaxformer_mt import atomic
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.data.stream.pair_fields import TEXT
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.experiment import checks
from flaxformer_mt.experiment.fit import Experiment
from flaxformer_mt.experiment.start import begin, recorded
from flaxformer_mt.interop.exports import exports, summary
from flaxformer_mt.training.devices import RULES_OPTION
from flaxformer_mt.training.memory import abstract_batch, require_training_memory, step_cost
from flaxformer_mt.training.parameters import describe
from flaxformer_mt.training.reporting.console import Sample, make_console, print_labelled
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


def print_test(parts: Experiment, workdir: Path, console: Console) -> None:
    """Evaluates the best checkpoint on the test corpus, if any; prints what it gives."""
    test, config = parts.dataset.test, parts.config
    if test is None:
        return
    step, hypotheses, metrics = parts.validation.test(workdir, console.is_terminal)
    name = test.texts.name
    head = f"test ({name}), best checkpoint (step {step:,}): loss {metrics['loss']:.4f}"
    if not config.model.has_inputs:
        console.print(f"\n{head}, perplexity {metrics['perplexity']:.2f}")
        return
    samples = map(Sample, test.texts.sources, hypotheses, test.texts.targets)
    for sample in itertools.islice(samples, config.train.show_translations):
        console.print()
        print_labelled(sample.rows(), console, width=12)
    console.print(
        f"\n{head}, BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}  "
        f"[{metrics['bleu_signature']}]",
        soft_wrap=not console.is_terminal,  # Terminals would break lines within words.
    )


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
            require_training_memory(parts.config, parts.devices)
        except UserError as error:
            console.print(f"memory   {error}: training would be refused here")
        print_labelled(costs(parts), console)
