"""The command `train`, which is also the program `train.py`."""

import argparse
import dataclasses
import inspect
import logging
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from flaxformer_mt import exit_codes, runtime
from flaxformer_mt.cli import help_text
from flaxformer_mt.cli.unknown_options import option_names, require_known
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.config.experiment import groups
from flaxformer_mt.config.files import load_config
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.interruption import Interruption
from flaxformer_mt.memory_limits import require_address_space
from flaxformer_mt.remote.publishing import is_published
from flaxformer_mt.remote.reading import local
from flaxformer_mt.run_layout import CONFIG
from flaxformer_mt.urls import require_local

_Flags = TypeVar("_Flags")


@dataclasses.dataclass(frozen=True)
class Flags(ExperimentConfig):
    """The options of the command: those of the program, and all fields of the configuration."""

    _: dataclasses.KW_ONLY
    config: Path
    """Python file with get_config() -> ExperimentConfig, the name of an included one (flaxformer-mt
    configs), or the config.json of a run; its values are the defaults below. If left out, that of
    the run in --workdir."""
    workdir: Path
    """Run folder, created if missing. An existing run is continued."""
    dry_run: bool = False
    """Check everything and print what would be trained, with shapes, parameters, memory and
    compilations, without training and without writing anything."""
    accept_changes: bool = False
    """Continue a run with other values of options, or other text, after its newest checkpoint; see
    docs/training.md. Without it, such a change is refused."""
    find_learning_rate: bool = False
    """Try growing learning rates in at most 200 steps from the start, without a run: plot the loss
    over them beside the run folder, as WORKDIR-learning-rate.png, and suggest a rate."""
    publish: str = ""
    """URL of an object store, s3://bucket/run, to which the run is published while it trains, and
    from which it is continued if the run folder is empty; see docs/remote.md."""
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
        return experiment_of(self)


def experiment_of(flags: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration among options of a program."""
    return ExperimentConfig(**{name: getattr(flags, name) for name in groups()})


def parse_flags(arguments: Sequence[str], program: str = "train.py") -> Flags:
    """Parses the command line, with the configuration file that it names as defaults."""
    description = (train.__doc__ or "").replace("flaxformer-mt train", program)
    return parse_experiment(Flags, arguments, program, description)


def parse_experiment(
    kind: type[_Flags], arguments: Sequence[str], program: str, description: str
) -> _Flags:
    """Parses options that are a configuration, with the file that they name as defaults.

    `kind` has the fields `config` and `workdir`; `description` is a docstring.
    """
    require_known(arguments, [*option_names(typing.get_type_hints(kind))], program)
    wants_help = bool({"-h", "--help"} & set(arguments))
    path = _configuration_file(arguments, wants_help)
    with prefixed("--config: "):
        config = ExperimentConfig() if path is None else load_config(path)
    found = (re.match(r"--optimizer\.([\w-]+)", each) for each in arguments)
    given = {each[1].replace("-", "_") for each in found if each}
    config = dataclasses.replace(config, optimizer=config.optimizer.without_other_warmup(given))
    if wants_help:
        description, _, _ = inspect.cleandoc(description).partition("\nArgs:\n")
        print(help_text.wrap(description), end="\n\n")
        print(f"Exit codes:\n{exit_codes.table()}", end="\n\n")
    make: Any = kind
    return tyro.cli(
        kind,
        prog=program,
        description="",
        args=list(arguments),
        default=make(**vars(config), config=path or tyro.MISSING, workdir=tyro.MISSING),
        registry=help_text.registry,
    )


def _configuration_file(arguments: Sequence[str], wants_help: bool) -> Path | None:
    """Returns the file of --config, or that of the run in --workdir; None if neither is given.

    Raises:
      UserError: there is no --config, and the folder holds no run to continue.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    finder.add_argument("--workdir", type=Path)
    finder.add_argument("--publish", default="")
    given = finder.parse_known_args(arguments)[0]
    if given.workdir is not None:
        require_local(given.workdir)
    if given.config is not None or given.workdir is None:
        return given.config if given.config is None else local(given.config)
    file = given.workdir / CONFIG
    if file.is_file():
        return file
    if given.publish and is_published(given.publish):
        return local(given.publish) / CONFIG
    if wants_help:
        return None
    raise UserError(
        f"--workdir={given.workdir} holds no run to continue: give --config to start one, such as "
        "--config=first_hour (flaxformer-mt configs lists them)"
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
    --train.num-steps=500. A run is continued with its own configuration:

      flaxformer-mt train --workdir=runs/quickstart

    docs/training.md explains how to stop and continue.

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
    if flags.publish and (flags.dry_run or flags.find_learning_rate):
        raise UserError(f"--publish={flags.publish} has no effect without training: leave it out")
    if flags.dry_run:
        experiment.dry_run(flags.experiment(), flags.workdir, accept_changes=flags.accept_changes)
    elif flags.find_learning_rate:
        _find_learning_rate(flags.experiment(), flags.workdir)
    else:
        experiment.train(
            flags.experiment(),
            flags.workdir,
            interruption=interruption,
            accept_changes=flags.accept_changes,
            publish=flags.publish or None,
        )


def _find_learning_rate(config: ExperimentConfig, workdir: Path) -> None:
    from flaxformer_mt import atomic, experiment
    from flaxformer_mt.plotting import drawing
    from flaxformer_mt.plotting.curves import save_rate_range

    picture = workdir.with_name(f"{workdir.name}-learning-rate.png")
    drawing.new_figure(1, 1)  # Raises now what saving would raise.
    atomic.make_folder(picture.parent)
    found = experiment.find_learning_rate(config, workdir)
    save_rate_range(picture, found.rates, found.losses, found.smoothed, found.peak)
    print(
        f"the loss was lowest with a rate of {10 * found.peak:.1e} ({picture}); try a tenth of it: "
        f"--optimizer.learning-rate={found.learning_rate:.2g}"
    )
