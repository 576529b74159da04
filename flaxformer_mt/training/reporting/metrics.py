"""Metrics of a run: aggregation over steps, speed, validation, and writers of files."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from flaxformer_mt import atomic
from flaxformer_mt.accelerators import accelerator_of
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.memory_limits import peak_memory
from flaxformer_mt.objectives.cross_entropy import Metrics
from flaxformer_mt.runs import metrics_file
from flaxformer_mt.training.parameters import Params
from flaxformer_mt.training.reporting.progress import Interval

MetricValues: TypeAlias = Mapping[str, float | int | str]
"""Metrics as reported, by name."""


def validate(
    eval_step: Callable[[Params, Batch], Metrics], params: Params, batches: Iterable[Batch]
) -> dict[str, float]:
    """Computes the metrics of a corpus, whose parameters and batches are on the devices.

    Returns:
      "loss" (what training minimizes), "accuracy", "cross_entropy" (the loss without label
      smoothing) and "perplexity" (its exponential, which may be infinite).
    """
    interval = Interval()
    for metrics in jax.device_get([eval_step(params, batch) for batch in batches]):
        interval.add(metrics)
    values = interval.means()
    with np.errstate(over="ignore"):
        return {**values, "perplexity": float(np.exp(values["cross_entropy"]))}


MEASUREMENTS = (
    "target_tokens_per_second",
    "target_tokens_per_second_per_device",
    "mfu",
    "memory_bytes",
    "data_wait_fraction",
)
"""The metrics of time and memory, in which two runs that are the same may differ."""


def measurements(interval: Interval, devices: Sequence[Any]) -> dict[str, float]:
    """Returns the `MEASUREMENTS` of the steps of an interval, as far as they are known.

    - "target_tokens_per_second", of all devices, and "target_tokens_per_second_per_device", without
      padding;
    - "mfu", the model FLOPs per second divided by the peak of the devices for bfloat16;
    - "memory_bytes", the most memory that a device of this process has had in use so far;
    - "data_wait_fraction", the fraction of the time that was spent waiting for batches.

    `devices` are all that train, of all processes and of one kind.
    """
    tokens_per_second = interval.metrics["target_tokens"][0] / interval.seconds
    each = tokens_per_second / len(devices)
    result = {
        "target_tokens_per_second": tokens_per_second,
        "target_tokens_per_second_per_device": each,
        "data_wait_fraction": interval.seconds_waited / interval.seconds,
    }
    accelerator = accelerator_of(devices[0].device_kind)
    flops = interval.means().get("flops_per_target_token")
    if accelerator is not None and flops is not None:
        result["mfu"] = each * flops / accelerator.flops
    own = [device for device in devices if device.process_index == jax.process_index()]
    memory = peak_memory(own)
    if memory is not None:
        result["memory_bytes"] = memory
    return result


class Writer(Protocol):
    """Writes the metrics of a run to a file, or to the console (`console.ConsoleWriter`)."""

    def rewind(self, step: int) -> None:
        """Discards the metrics of later steps.

        Called before the first `write`, and when a run returns to its newest checkpoint.
        """
        return

    def write(self, step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        """Writes the metrics of a split ("train", "valid") after a step.

        `is_best`: whether they are of the best validation so far.
        """

    def close(self) -> None:
        """Called after the last `write`."""
        return


class JsonLinesWriter(Writer):
    """Writes `metrics.jsonl`: {"step": 50, "split": "train", "loss": ...}, one object per line.

    The last member of each object, "crc32", is a checksum of the others.
    """

    def __init__(self, path: str | Path, announce: Callable[[str], None] = print) -> None:
        self._path = Path(path)
        self._announce = announce

    def rewind(self, step: int) -> None:
        """Also removes damaged lines, and announces them.

        Metrics of the test corpus are removed as well: they belong to the end of the run.
        """
        if step and not self._path.exists():
            self._announce(f"{self._path} is missing: metrics up to step {step:,} are lost")
        kept = []
        for line in metrics_file.read_lines(self._path):
            if line.values is None:
                self._announce(
                    f"{self._path} was damaged: line {line.number} is not what was written, and "
                    f"was removed: {line.text[:200]!r}"
                )
            elif line.values["step"] <= step and line.values["split"] != "test":
                kept.append(line.text + "\n")
        atomic.write_text(self._path, "".join(kept))

    def write(self, step: int, split: str, values: MetricValues, is_best: bool = False) -> None:
        """Infinity and NaN, which JSON does not have, are written as null."""
        line: dict[str, float | int | str | None] = {"step": step, "split": split}
        for name, value in values.items():
            is_writable = isinstance(value, str) or math.isfinite(value)
            line[name] = value if is_writable else None
        # Durably: a checkpoint that is written after this line must not outlive it.
        atomic.append_text(self._path, metrics_file.format_line(line) + "\n")
