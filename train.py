"""Trains one experiment in one folder, from the start or from where it stopped.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the configuration can be set: --optimizer.learning-rate=1e-3 --train.num-steps=500.

Exit codes: 0 trained to the end; 1 something cannot be used, one line says what; 75 stopped by
SIGTERM or Ctrl-C after saving, the same command goes on; 130 stopped by a second Ctrl-C at once.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from flaxformer_mt import distributed, runtime
from flaxformer_mt.config import ExperimentConfig, from_json
from flaxformer_mt.data.dataset import Dataset, EvaluationSet, open_all, open_dataset
from flaxformer_mt.data.sanity_checks import check_sides, warn_of_shared_pairs
from flaxformer_mt.data.stream.batches import Batch, DataPosition, evaluation_batches
from flaxformer_mt.data.stream.prefetch import Prefetched
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation import evaluate
from flaxformer_mt.interruption import (
    EXIT_AT_ONCE,
    EXIT_INTERRUPTED,
    Interrupted,
    Interruption,
)
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.runs.checkpoint import Checkpointer, restore_params
from flaxformer_mt.runs.folder import check_unchanged, holds_run, write_run
from flaxformer_mt.runs.lock import locked
from flaxformer_mt.training import loop
from flaxformer_mt.training.initial import load_parameters, start_from, tokenizer_path
from flaxformer_mt.training.memory import step_cost
from flaxformer_mt.training.metrics import (
    ConsoleWriter,
    JsonLinesWriter,
    TensorBoardWriter,
    Writer,
    validate,
)
from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
from flaxformer_mt.training.parallel import Strategy, make_strategy
from flaxformer_mt.training.parameters import Params, describe
from flaxformer_mt.training.state import TrainState, create_state
from flaxformer_mt.training.step import eval_step, train_step

console = Console(highlight=False, markup=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Flags(ExperimentConfig):
    """Trains an experiment; every field of its configuration can be set here."""

    config: Path = dataclasses.field(kw_only=True)
    """Python file with get_config() -> ExperimentConfig, or the config.json of a run; the defaults
    below are its values."""
    workdir: Path = dataclasses.field(kw_only=True)
    """Run folder, made if missing. A run that is there already is continued."""
    dry_run: bool = dataclasses.field(default=False, kw_only=True)
    """Check everything and say what would be trained, with shapes, parameters, memory and
    compilations, but write nothing and do not train."""
    coordinator: str = dataclasses.field(default="", kw_only=True)
    """HOST:PORT of the first of several processes that train together; see docs/scaling.md."""
    num_processes: int = dataclasses.field(default=0, kw_only=True)
    """How many processes train together."""
    process_id: int = dataclasses.field(default=-1, kw_only=True)
    """Number of this process, from 0."""
    cluster: distributed.Cluster = dataclasses.field(default="none", kw_only=True)
    """Instead of the three above: what started the processes and knows their numbers. auto finds
    SLURM, Open MPI and Cloud TPU."""

    def experiment(self) -> ExperimentConfig:
        """The configuration without what belongs to this start of the program."""
        fields = dataclasses.fields(ExperimentConfig)
        return ExperimentConfig(**{field.name: getattr(self, field.name) for field in fields})


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Reads the command line on top of the configuration file that it names.

    Raises:
      UserError: the file is missing or makes no configuration, or values do not go together.
      SystemExit: an option is unknown, mistyped or missing, or help was asked for.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    experiment = ExperimentConfig() if path is None else load_config(path)
    defaults = {
        field.name: getattr(experiment, field.name)
        for field in dataclasses.fields(ExperimentConfig)
    }
    return tyro.cli(
        Flags,
        prog="train.py",
        description=__doc__,
        args=list(arguments),
        default=Flags(
            **defaults,
            config=tyro.MISSING if path is None else path,
            workdir=tyro.MISSING,
        ),
    )


def load_config(path: Path) -> ExperimentConfig:
    """Runs `get_config()` of a configuration file, or reads the `config.json` of a run.

    Raises:
      UserError: there is no such file, or it does not give an `ExperimentConfig`.
    """
    if not path.is_file():
        raise UserError(f"--config: there is no file {path}")
    if path.suffix == ".json":
        try:
            return from_json(path.read_text(encoding="utf-8"))
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(f"--config: {path}: {error}") from error
    get_config = runpy.run_path(str(path)).get("get_config")
    if not callable(get_config):
        raise UserError(f"--config: {path} defines no get_config()")
    experiment = get_config()
    if not isinstance(experiment, ExperimentConfig):
        raise UserError(f"--config: get_config() of {path} gives no ExperimentConfig")
    return experiment


@contextlib.contextmanager
def open_folder(flags: Flags) -> Iterator[Path]:
    """The folder to work in: the locked run folder, or one that is thrown away after a dry run.

    A start that was refused leaves no folder behind.

    Raises:
      UserError: another process trains there, or the folder cannot be written to.
    """
    if flags.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if not distributed.is_main():
        yield flags.workdir
        return
    existed = flags.workdir.exists()
    with locked(flags.workdir, console.print):
        try:
            yield flags.workdir
        finally:
            if not existed and not (flags.workdir / "config.json").exists():
                shutil.rmtree(flags.workdir)


def prepare(flags: Flags, folder: Path) -> "Experiment":
    """Puts a new run together, or the one that is continued; whatever is wrong is found here.

    Of several processes the first one tokenises, and writes what makes a folder a run.

    Raises:
      UserError: the folder holds another run, or something that the user gave cannot be used.
    """
    given = flags.experiment()
    if not distributed.is_main():
        distributed.barrier("data")
    continued = holds_run(flags.workdir, given)
    corpora = open_all(given)
    if continued:
        tokenizers = Tokenizers.load(flags.workdir / "tokenizer")
        check_unchanged(flags.workdir, corpora, tokenizers)
    else:
        if given.model.has_inputs:
            check_sides(corpora["train"], [*corpora["valid"], *corpora["test"]])
        data = dataclasses.replace(given.data, tokenizer_path=tokenizer_path(given))
        tokenizers = Tokenizers.for_run(corpora["train"], data, given.model.has_inputs)
    dataset = open_dataset(given, corpora, tokenizers, folder / "cache")
    experiment = Experiment(dataset)
    if not continued:
        experiment.load_given_parameters()  # What is wrong with them is said before writing.
    if distributed.is_main():
        if not continued:
            held_out = [dataset.valid.tokens, dataset.test.tokens]
            warn_of_shared_pairs(dataset.training.corpora, held_out)
            if not flags.dry_run:
                write_run(flags.workdir, given, corpora, tokenizers)
        distributed.barrier("data")
    return experiment


class Experiment:
    """The parts of an experiment, put together.

    Args:
      dataset: its data; knows the configuration.

    Raises:
      UserError: devices, rows or schedule do not fit.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.config = config = dataset.config
        self.strategy: Strategy = make_strategy(config)
        self.model = Transformer(config.model)
        self.schedule = make_schedule(
            config.optimizer, config.model.d_model, config.train.num_steps
        )
        self.optimizer = make_optimizer(config.optimizer, self.schedule)
        self.make_state: Callable[[], TrainState] = functools.partial(
            create_state, self.model, self.optimizer, config.train
        )
        self.train_step = functools.partial(
            train_step, model=self.model, optimizer=self.optimizer, config=config.train
        )
        self._batches = {
            split: evaluation_batches(
                evaluated.tokens, config, self.strategy.row_shards, self.strategy.shard
            )
            for split, evaluated in (("valid", dataset.valid), ("test", dataset.test))
        }
        shapes = {_shapes(batch) for batches in self._batches.values() for batch in batches}
        self.run_eval_step = self.strategy.compile_eval_step(
            functools.partial(eval_step, model=self.model, config=config.train), len(shapes)
        )

    def report(self) -> Iterator[tuple[str, str]]:
        """The lines at the start of a run, each with what it is about."""
        config = self.config
        yield from self.dataset.report()
        params = jax.eval_shape(self.make_state).params
        yield (
            "model",
            f"{describe(params, config.train.freeze, config.model)}, {config.model.dtype}",
        )
        axes = " x ".join(f"{size} {axis}" for axis, size in self.strategy.mesh.shape.items())
        devices = self.strategy.devices
        yield "devices", f"{len(devices)} {devices[0].platform} ({axes})"
        for line in self.strategy.sharding(params).left_whole:
            yield "whole", line

    def costs(self) -> Iterator[tuple[str, str]]:
        """What each compilation of the training step would need of a device; compiles them."""
        for shape in self.dataset.training.shapes:
            cost = step_cost(
                self.strategy, self.make_state, self.train_step, shape, self.config.model.has_inputs
            )
            rows = f"{shape.rows} x {shape.source_length} and {shape.target_length} tokens"
            yield "step", f"one compilation for {rows}: {cost}"

    @functools.cache  # noqa: B019  (an experiment lives as long as the program)
    def load_given_parameters(self) -> Params | None:
        """Those that `train.init_from` names, on the host.

        Raises:
          UserError: they cannot be read, or belong to another model.
        """
        if not self.config.train.init_from:
            return None
        template = jax.eval_shape(self.make_state).params
        return load_parameters(self.config.train.init_from, self.config.model, template)

    def initial_state(self) -> TrainState:
        """The state before the first step, on the devices."""
        state = self.strategy.create_state(self.make_state)
        params = self.load_given_parameters()
        return state if params is None else start_from(state, params, self.strategy.place_state)

    def abstract_state(self) -> TrainState:
        """What a checkpoint is read into: shapes, dtypes and places on the devices."""
        return self.strategy.abstract_state(self.make_state)

    def stream(self, position: DataPosition) -> Prefetched[Batch]:
        """The placed batches from a position on."""
        training, strategy = self.dataset.training, self.strategy

        def read(position: DataPosition) -> tuple[Batch, DataPosition]:
            batch, after = training.read(position, strategy.shard)
            return strategy.place_batch(batch), after

        return Prefetched(read, position)

    def measure(self, split: str, params: Any) -> dict[str, Any]:
        """Loss, accuracy and perplexity of a development or test set."""
        batches = map(self.strategy.place_batch, self._batches[split])
        return validate(self.run_eval_step, params, batches)

    def evaluate_valid(self, params: Any, step: int) -> dict[str, Any]:
        """The figures of a validation."""
        figures = self.measure("valid", params)
        if not self.config.model.has_inputs:
            return figures
        whole = self.strategy.gather(params)
        _, quality = self.translate(whole, self.dataset.valid, self.config.train.eval_sentences)
        return {**figures, **quality}

    def translate(
        self, params: Any, evaluated: EvaluationSet, num_sentences: int = 0
    ) -> tuple[list[str], dict[str, Any]]:
        """Translations of the first sentences (0 = all), each process a part, and their quality."""
        sources = evaluated.texts.sources[: num_sentences or None]
        translator = Translator(self.config, params, self.dataset.tokenizers)
        own = translator.translate(
            distributed.share_out(sources), show_progress=console.is_terminal
        )
        hypotheses = distributed.gather_texts(own)
        references = evaluated.texts.targets[: len(sources)]
        return hypotheses, evaluate(hypotheses, references, with_ter=False)


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """What a step is compiled for."""
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def run(flags: Flags) -> None:
    """Trains, and measures the best checkpoint on the test corpus.

    Raises:
      UserError: something that the user gave cannot be used.
      Interrupted: SIGTERM or Ctrl-C; everything is saved.
    """
    distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id, flags.cluster)
    if flags.dry_run and jax.process_count() > 1:
        raise UserError("--dry-run is for one process: start it without the others")
    console.quiet = not distributed.is_main()
    make_strategy(flags.experiment())
    holds_run(flags.workdir, flags.experiment())  # Refused here, nothing is touched.
    with open_folder(flags) as folder:
        experiment = prepare(flags, folder)
        print_report(experiment.report())
        if flags.dry_run:
            print_report(experiment.costs())
            return
        train_to_the_end(experiment, folder)
        if experiment.config.model.has_inputs:  # A language model has nothing to translate.
            measure_test(experiment, folder)


def print_report(lines: Iterator[tuple[str, str]]) -> None:
    """Prints lines behind what each is about."""
    for name, line in lines:
        console.print(f"{name:<8} {line}")


def train_to_the_end(experiment: Experiment, workdir: Path) -> None:
    """Trains from the newest checkpoint, or from the beginning.

    Raises:
      UserError: see `loop.train`.
      Interrupted: SIGTERM or Ctrl-C.
    """
    train = experiment.config.train
    writers: list[Writer] = []
    if distributed.is_main():
        writers = [
            JsonLinesWriter(workdir / "metrics.jsonl"),
            TensorBoardWriter(workdir / "tensorboard"),
            ConsoleWriter(train.num_steps, console),
        ]
    several = jax.process_count() > 1
    with (
        Checkpointer(
            workdir, train.keep_last, train.keep_best, train.best_metric, console.print
        ) as checkpointer,
        Interruption(distributed.agree if several else None, train.log_every) as interruption,
    ):
        is_new = checkpointer.latest_step() is None
        loop.train(
            experiment.initial_state() if is_new else experiment.abstract_state(),
            train_step=experiment.strategy.compile_train_step(
                experiment.train_step, len(experiment.dataset.training.shapes)
            ),
            stream=experiment.stream,
            evaluate=experiment.evaluate_valid,
            schedule=experiment.schedule,
            checkpointer=checkpointer,
            writers=writers,
            config=train,
            should_stop=interruption.requested,
            announce=console.print,
        )


def measure_test(experiment: Experiment, workdir: Path) -> None:
    """Translates the test corpus with the best checkpoint, and prints and writes the figures."""
    step, params = restore_params(workdir, "best")
    test = experiment.dataset.test
    hypotheses, figures = experiment.translate(params, test)
    figures |= experiment.measure("test", experiment.strategy.place_state(params))
    if distributed.is_main():
        JsonLinesWriter(workdir / "metrics.jsonl").write(step, "test", figures)
    for number in range(min(experiment.config.train.show_translations, len(test.texts))):
        console.print(f"\nsource       {test.texts.sources[number]}")
        console.print(f"translation  {hypotheses[number]}")
        console.print(f"reference    {test.texts.targets[number]}")
    console.print(
        f"\ntest ({test.texts.name}), best checkpoint (step {step:,}): "
        f"loss {figures['loss']:.4f}, BLEU {figures['bleu']:.2f}, chrF {figures['chrf']:.2f}  "
        f"[{figures['bleu_signature']}]"
    )
    console.print(f"translate with: flaxformer-mt translate --run {workdir} < source.txt")


def main() -> None:
    """The entry point."""
    runtime.configure()
    logging.basicConfig(level=logging.WARNING, format="train.py: %(message)s")
    try:
        run(parse_flags(sys.argv[1:]))
    except UserError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(1)
    except Interrupted as interrupted:
        print(f"train.py: {interrupted}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        print("train.py: stopped", file=sys.stderr)
        sys.exit(EXIT_AT_ONCE)


if __name__ == "__main__":
    main()
