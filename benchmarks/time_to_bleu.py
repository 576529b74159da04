"""Writes the MLPerf log of a run: the time until its validation reaches a BLEU.

    python benchmarks/time_to_bleu.py RUN --target-bleu 25 [--log FILE]

MLPerf 0.5 to 0.7 trained the Transformer on WMT14 English to German until the BLEU of newstest2014
was 25. To compare a run with that, its validation corpus has to be newstest2014, all of it
(`--train.eval-sentences=0`); its `bleu_signature` says how BLEU was computed.

The log has the lines that MLPerf's submissions have, `:::MLLOG` and JSON: `run_start`, an
`eval_accuracy` (BLEU divided by 100) for each validation until the target is reached, and
`run_stop` with the status `success` or `aborted`. `time_ms` is in milliseconds since 1970.

metrics.jsonl has no times of day, which TensorBoard's files of the same metrics have: a run starts
with its first step, whose time is that of the first report without the time of the steps in it. The
time includes compilation, validations, checkpoints, and pauses of a run that was continued. Without
TensorBoard's files, `time_ms` starts at 0 and is that of the training steps alone.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.run_layout import METRICS, TENSORBOARD
from flaxformer_mt.runs.folder import require_run
from flaxformer_mt.runs.metrics_file import read_metrics

Reports = dict[tuple[int, str], float]
"""The time in seconds at which the metrics of (step, split) were written."""


class Event(NamedTuple):
    """A line of the log."""

    seconds: float
    key: str
    value: float | None
    metadata: Mapping[str, Any]

    def line(self) -> str:
        """Returns the line as MLPerf's submissions have it, without a line feed."""
        kinds = {"run_start": "INTERVAL_START", "run_stop": "INTERVAL_END"}
        fields = {
            "namespace": "",
            "time_ms": round(1000 * self.seconds),
            "event_type": kinds.get(self.key, "POINT_IN_TIME"),
            "key": self.key,
            "value": self.value,
            "metadata": self.metadata,
        }
        return f":::MLLOG {json.dumps(fields)}"


def log(rows: Sequence[Mapping[str, Any]], times: Reports, target: float) -> list[Event]:
    """Returns the log of a run.

    Args:
      rows: the lines of its metrics.jsonl.
      times: when they were written; without any, the time is that of the training steps.
      target: the BLEU that its validation has to reach, from 0 to 100.
    """
    rows = [row for row in rows if row["split"] in ("train", "valid")]
    evaluations = [row for row in rows if row["split"] == "valid" and row.get("bleu") is not None]
    if not evaluations:
        raise UserError(f"{METRICS} has no BLEU of a validation")
    times = times or _training_times(rows)
    missing = next((row for row in rows if (row["step"], row["split"]) not in times), None)
    if missing is not None:
        raise UserError(
            f"{TENSORBOARD} has no time of step {missing['step']}, {missing['split']}: restore its "
            f"files, or move the folder away to count the time of the training steps in {METRICS}"
        )
    if rows[0]["split"] != "train":
        raise UserError(f"{METRICS} has no report of training before the first validation")
    start = times[rows[0]["step"], "train"] - _seconds(rows[0])
    events = [Event(start, "run_start", None, {})]
    for row in evaluations:
        step, bleu = row["step"], row["bleu"]
        metadata = {"step_num": step, "bleu": bleu, "bleu_signature": row.get("bleu_signature")}
        events.append(Event(times[step, "valid"], "eval_accuracy", bleu / 100, metadata))
        if bleu >= target:
            status, last = "success", row
            break
    else:
        status, last = "aborted", rows[-1]
    metadata = {"status": status, "step_num": last["step"]}
    return [*events, Event(times[last["step"], last["split"]], "run_stop", None, metadata)]


def read_times(folder: Path) -> Reports:
    """Reads the times from TensorBoard's files; those of a continued run replace earlier ones."""
    from tensorboardX.proto.event_pb2 import Event as TensorBoardEvent

    times: Reports = {}
    for path in sorted(folder.glob("events*"), key=lambda path: int(path.suffix[1:])):
        for record in _records(path.read_bytes()):
            event = TensorBoardEvent.FromString(record)
            for value in event.summary.value:
                times[event.step, value.tag.partition("/")[0]] = event.wall_time
    return times


def _records(content: bytes) -> Iterator[bytes]:
    """Yields the complete records of a TFRecord file: length, checksum, data, checksum."""
    offset = 0
    while offset + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        record = content[offset + 12 : offset + 12 + length]
        if len(record) == length:
            yield record
        offset += 16 + length


def _training_times(rows: Sequence[Mapping[str, Any]]) -> Reports:
    seconds, reported, times = 0.0, 0, {}
    for row in rows:
        step, split = row["step"], row["split"]
        if split == "train":
            seconds, reported = seconds + _seconds(row), step
        elif step != reported:
            raise UserError(
                f"{METRICS} has no report of training at step {step}, of a validation, so that its "
                "time is not known: train with --train.eval-every a multiple of --train.log-every"
            )
        times[step, split] = seconds
    return times


def _seconds(row: Mapping[str, Any]) -> float:
    """Returns the time of the training steps of a report."""
    return row["target_tokens"] / row["target_tokens_per_second"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the log, prints the time, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--target-bleu", type=float, required=True, help="from 0 to 100")
    parser.add_argument("--log", type=Path, help="file to write (default: standard output)")
    options = parser.parse_args(arguments)
    try:
        report(options.run, options.target_bleu, options.log)
    except (OSError, UserError) as error:
        print(f"time_to_bleu.py: error: {error}", file=sys.stderr)
        return ExitCode.FAILURE
    return ExitCode.SUCCESS


def report(run: Path, target: float, path: Path | None) -> None:
    """Writes the log of a run to a file, or prints it, and prints the time to the target."""
    require_run(run)
    times = read_times(run / TENSORBOARD)
    if not times:
        print(
            f"time_to_bleu.py: note: {run} has no {TENSORBOARD}, so times of day are missing: the "
            "time is that of the training steps, without validations, checkpoints and pauses",
            file=sys.stderr,
        )
    events = log(read_metrics(run / METRICS), times, target)
    text = "".join(f"{event.line()}\n" for event in events)
    if path is None:
        print(text, end="")
    else:
        path.write_text(text, encoding="utf-8")
    seconds = events[-1].seconds - events[0].seconds
    step = events[-1].metadata["step_num"]
    if events[-1].metadata["status"] == "success":
        print(f"BLEU {target:g} was reached after {seconds:,.1f} s, at step {step:,}")
    else:
        best = max(event.metadata["bleu"] for event in events[1:-1])
        print(f"BLEU {target:g} was not reached in {seconds:,.1f} s; the best was {best:.2f}")


if __name__ == "__main__":
    sys.exit(main())
