"""The command `train`, which is also the program `train.py`."""

import argparse
import dataclasses
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from flaxformer_mt import exit_codes, runtime
from flaxformer_mt.cli import help_text
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.files import load_config
from flaxformer_mt.errors import prefixed
from flaxformer_mt.interruption import Interruption
from flaxformer_mt.memory_limits import require_address_space


@dataclasses.dataclass(frozen=True)
class Flags(ExperimentConfig):
    """The options of the command: those of the program, and all fields of the configuration."""

    _: dataclasses.KW_ONLY
    config: Path
    """Python file with get_config() -> ExperimentConfig, or the config.json of a run; its values
    are the defaults below."""
    workdir: Path
    """Run folder, created if missing. An existing run is continued."""
    dry_run: bool = False
    """Check everything and print what would be trained, with shapes, parameters, memory and
    compilations, without training and without writing anything."""
    find_learning_rate: bool = False
    """Try growing learning rates in at most 200 steps from the start, without a run: plot the loss
    over them beside the run folder, as WORKDIR-learning-rate.png, and suggest a rate."""
    coordinator: str = ""
    """HOST:PORT of the first of several processes that train together; see docs/scaling.md."""
    num_processes: int = 0
    """Number of processes that train together."""
    process_id: int = -1
    """Number of this process, from 0."""
    cluster: Literal["none", "auto", "slurm", "ompi", "mpi4py"] = "none"
    """Instead of the three above: the launcher that numbers the processes. auto detects SLURM, Open
    MPI and Cloud TPU."""

    def experiment(self) -> ExperimentConfig:
        """Returns the configuration, without the options of the program."""
        return ExperimentConfig(**{name: getattr(self, name) for name in groups()})


def parse_flags(arguments: Sequence[str], program: str = "train.py") -> Flags:
    """Parses the command line, with the configuration file that it names as defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    with prefixed("--config: "):
        config = ExperimentConfig() if path is None else load_config(path)
    if {"-h", "--help"} & set(arguments):
        description, _, _ = inspect.cleandoc(train.__doc__ or "").partition("\nArgs:\n")
        print(help_text.wrap(description.replace("flaxformer-mt train", program)), end="\n\n")
        print(f"Exit codes:\n{exit_codes.table()}", end="\n\n")
    return tyro.cli(
        Flags,
        prog=program,
        description="",
        args=list(arguments),
        default=Flags(**vars(config), config=path or tyro.MISSING, workdir=tyro.MISSING),
        registry=help_text.registry,
    )


def run(
    arguments: Sequence[str],
    program: str = "train.py",
    interruption: Interruption | None = None,
) -> None:
    """Parses the command line and trains."""
    runtime.configure()
    logging.basicConfig(level=logging.WARNING, format=f"{program}: warning: %(message)s")
    flags = parse_flags(arguments, program)
    require_address_space()
    train(flags, interruption)


def train(flags: Flags, interruption: Interruption | None = None) -> None:
    """Trains a model or continues a run; the same program as train.py.

      flaxformer-mt train --config=configs/quickstart.py --workdir=runs/quickstart

    Any field of the configuration can be set: --optimizer.learning-rate=1e-3
    --train.num-steps=500. docs/training.md explains how to stop and continue.

    Args:
      flags: The options, from `parse_flags`.
      interruption: Stops training in an orderly way.

    Raises:
      UserError: something that the user gave cannot be used.
      Interrupted: a signal arrived, and everything is saved.
    """
    from flaxformer_mt import distributed, experiment

    distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id, flags.cluster)
    if interruption is not None:
        interruption.install_handlers()  # JAX has replaced that of SIGTERM.
    if flags.dry_run:
        experiment.dry_run(flags.experiment(), flags.workdir)
    elif flags.find_learning_rate:
        _find_learning_rate(flags.experiment(), flags.workdir)
    else:
        experiment.train(flags.experiment(), flags.workdir, interruption=interruption)


def _find_learning_rate(config: ExperimentConfig, workdir: Path) -> None:
    from flaxformer_mt import experiment
    from flaxformer_mt.plotting import drawing
    from flaxformer_mt.plotting.rate_range import save_rate_range

    picture = workdir.with_name(f"{workdir.name}-learning-rate.png")
    drawing.new_figure(1, 1)  # Raises now what saving would raise.
    picture.parent.mkdir(parents=True, exist_ok=True)
    found = experiment.find_learning_rate(config, workdir)
    save_rate_range(picture, found.rates, found.losses, found.smoothed, found.peak)
    print(
        f"the loss was lowest with a rate of {10 * found.peak:.1e} ({picture}); try a tenth of it: "
        f"--optimizer.learning-rate={found.learning_rate:.2g}"
    )
