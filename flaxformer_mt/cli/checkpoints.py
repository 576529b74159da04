"""Commands on whole run folders: `inspect`, `average` and `publish`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxformer_mt.cli import output
from flaxformer_mt.cli.options import CheckpointChoice, RunFolder
from flaxformer_mt.config.fields import MAX_INTEGER, Bounds
from flaxformer_mt.errors import UserError, shown


def inspect(
    run: RunFolder,
    checkpoint: Annotated[CheckpointChoice, tyro.conf.arg(metavar="STEP")] = "last",
    parameters: Annotated[bool, tyro.conf.arg(aliases=["-p"])] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Describes a run: checkpoints, sizes, configuration, fingerprints.

    The checkpoints are listed with the validation metric that ranks them (train.best-metric).

    Examples:
      flaxformer-mt inspect --run RUN
      flaxformer-mt inspect --run RUN --checkpoint best --json

    Args:
      run: Run folder of the trained model.
      checkpoint: "best" by validation, "last", or the step of a checkpoint.
      parameters: List the parameters as well, by path, with their shapes.
      as_json: Print a JSON object with everything instead of `name: value` lines.
    """
    from flaxformer_mt.trained_model import describe_run

    description = describe_run(run, checkpoint, output.print_note)
    if as_json:
        output.print_json(description)
    else:
        output.print_lines(_lines(description, parameters))


def _lines(description: dict[str, Any], parameters: bool) -> Iterator[str]:
    from flax.traverse_util import flatten_dict

    shapes = description.pop("parameters")
    for name, value in flatten_dict(description, sep=".").items():
        if value is not None:
            yield f"{name}: {value}"
        elif name.startswith("checkpoints."):
            yield f"{name.rpartition('.')[0]}: not validated"
    if parameters:
        yield from (f"parameters.{path}: {shape}" for path, shape in shapes.items())


def average(
    run: RunFolder,
    last: Annotated[int | None, Bounds(1, MAX_INTEGER), tyro.conf.arg(metavar="N")] = None,
    best: Annotated[int | None, Bounds(1, MAX_INTEGER), tyro.conf.arg(metavar="N")] = None,
    output_folder: Annotated[Path | None, tyro.conf.arg(name="output", metavar="RUN")] = None,
) -> None:
    """Averages the parameters of several checkpoints of a run.

    The average often translates better than each of the checkpoints. The result is a run folder
    that every other command accepts.

    Examples:
      flaxformer-mt average --run RUN --last 5
      flaxformer-mt translate --run RUN/averaged < source.txt

    Args:
      run: Run folder of the trained model.
      last: Average the N newest checkpoints; training keeps as many as
        --train.keep-last.
      best: Average the N best checkpoints instead; training keeps as many as
        --train.keep-best.
      output_folder: Run folder to create. Default: `averaged` in the run folder.
    """
    from flaxformer_mt.run_layout import AVERAGED
    from flaxformer_mt.runs.averaging import average_run

    if (last is None) == (best is None):
        raise UserError("give --last or --best, the number of checkpoints to average")
    which: Literal["last", "best"] = "best" if last is None else "last"
    folder = output_folder or run / AVERAGED
    if output_folder is None and shown(str(run)) != str(run):
        raise UserError(f"--run={run} is read only: give the local folder to create as --output")
    steps = average_run(run, folder, last or best or 0, which, announce=output.print_note)
    listed = ", ".join(map(str, steps))
    output.print_lines([f"{folder}: the mean of the checkpoints of steps {listed}"])


def publish(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")],
) -> None:
    """Publishes a run to an object store, and removes what is gone.

    The URL has to be empty, or hold this run, as after train --publish.

    Examples:
      flaxformer-mt publish RUN s3://bucket/run
      flaxformer-mt translate --run s3://bucket/run < source.txt

    Args:
      run: Run folder.
      url: Folder of the store, s3://bucket/run or gs://bucket/run.
    """
    from flaxformer_mt.remote import publishing
    from flaxformer_mt.runs.folder import require_run

    require_run(run)
    publishing.publish(run, url)
    output.print_lines([f"{run} is published: {url}"])
