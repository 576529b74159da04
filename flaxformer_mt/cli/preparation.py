"""The command `prepare`: the vocabulary and the tokens of a run, before it trains."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from flaxformer_mt.cli import output
from flaxformer_mt.cli.training import experiment_of, parse_experiment
from flaxformer_mt.config import ExperimentConfig
from flaxformer_mt.errors import UserError, requiring


@dataclasses.dataclass(frozen=True)
class PrepareFlags(ExperimentConfig):
    """The options of the command: those of the program, and all fields of the configuration."""

    _: dataclasses.KW_ONLY
    config: Path
    """As for training."""
    workdir: Path
    """Run folder, created if missing."""
    num_workers: int = 0
    """Processes that tokenize, each a part of the text; 0 = one for each core."""
    shard: str = ""
    """i/N, from 0/N: tokenize only this part, on one of N machines that share the run folder. When
    all are done, the same command without --shard joins them, and so does training."""
    engine: Literal["processes", "beam"] = "processes"
    """beam: Apache Beam distributes the parts, given by --num-workers, to workers that share the
    run folder."""
    beam_options: str = ""
    """Options of its pipeline, such as "--runner=FlinkRunner --flink_master=HOST:8081"; by default
    it runs here."""


def run(arguments: Sequence[str]) -> int:
    """Parses the options and prepares the run."""
    prepare(parse(arguments), arguments)
    return 0


def parse(arguments: Sequence[str]) -> PrepareFlags:
    """Parses the options, with the configuration file that they name as defaults."""
    description = prepare.__doc__ or ""
    return parse_experiment(PrepareFlags, arguments, "flaxformer-mt prepare", description)


def prepare(flags: PrepareFlags, arguments: Sequence[str]) -> None:
    """Learns a run's vocabulary and tokenizes its text before training.

      flaxformer-mt prepare --config=configs/quickstart.py --workdir=RUN
      flaxformer-mt train --workdir=RUN

    Continued after an interruption, it makes only what is missing. On several machines, such as the
    tasks of a SLURM array of 8:

      flaxformer-mt prepare --config=C --workdir=RUN --shard=$SLURM_ARRAY_TASK_ID/8

    Args:
      flags: The options, from `parse`.
      arguments: The same as they were given, for other processes.

    Raises:
      UserError: something that the user gave cannot be used, or a process has failed.
    """
    from flaxformer_mt import experiment

    config, workdir = experiment_of(flags), flags.workdir
    if flags.num_workers < 0:
        raise UserError(f"--num-workers={flags.num_workers} is negative: give 0 or more")
    if flags.shard:
        found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", flags.shard)
        index, count = map(int, found.groups()) if found else (0, 0)
        if index >= count:
            raise UserError(f"--shard={flags.shard}: give i/N, such as 0/2 and 1/2 for 2 shards")
        start = experiment.begin(config, workdir)
        start.text.tokenize_part(start.tokenizers, index, count)
        output.print_note(
            f"part {flags.shard} of the text is tokenized; when all are: flaxformer-mt prepare "
            f"--config={flags.config} --workdir={workdir}"
        )
        return
    count = flags.num_workers or len(os.sched_getaffinity(0))
    if flags.engine == "beam" or count > 1:
        start = experiment.begin(config, workdir)  # Learns the vocabulary.
    if flags.engine == "beam":
        _run_beam(arguments, count, flags.beam_options.split())
    elif count > 1:
        with _processes(arguments, range(1, count), count):
            start.text.tokenize_part(start.tokenizers, 0, count)
    with experiment.open_folder(workdir) as folder:
        prepared = experiment.prepare(config, folder)
    output.print_lines(f"{label:<8}{line}" for label, line in prepared.dataset.report())
    output.print_lines([f"train with: flaxformer-mt train --workdir={workdir}"])


def _command(arguments: Sequence[str], index: int, count: int) -> list[str]:
    start = [sys.executable, "-m", "flaxformer_mt", "prepare"]
    return [*start, *arguments, f"--shard={index}/{count}"]


@contextlib.contextmanager
def _processes(arguments: Sequence[str], indices: Iterable[int], count: int) -> Iterator[None]:
    """Tokenizes some parts in processes, and waits for them at the end of the block."""
    processes = [
        subprocess.Popen(
            _command(arguments, index, count),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in indices
    ]
    try:
        yield
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.terminate()
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            raise UserError(f"a process that tokenizes has failed: {_last_line(error)}")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].removeprefix("flaxformer-mt: error: ")


def _run_beam(arguments: Sequence[str], count: int, options: Sequence[str]) -> None:
    with requiring("--engine=beam", "'flaxformer_mt[beam]'"):
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

    with apache_beam.Pipeline(options=PipelineOptions([*options])) as pipeline:
        commands = [_command(arguments, index, count) for index in range(count)]
        parts = pipeline | apache_beam.Create(commands) | apache_beam.Reshuffle()
        parts | apache_beam.Map(_run_part)


def _run_part(command: list[str]) -> None:
    """Tokenizes a part on a worker, whose Python has this package as well."""
    process = subprocess.run(
        [sys.executable, *command[1:]], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if process.returncode:
        raise RuntimeError(_last_line(process.stderr))
