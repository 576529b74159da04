"""How fast training is, and how much memory it takes."""

from collections.abc import Sequence
from typing import Any

import jax

from flaxformer_mt.accelerators import accelerator_of
from flaxformer_mt.memory_limits import peak_memory
from flaxformer_mt.training.reporting.progress import Sums

MEASUREMENTS = (
    "target_tokens_per_second",
    "target_tokens_per_second_per_device",
    "mfu",
    "memory_bytes",
    "data_wait_fraction",
)
"""The metrics of time and memory, in which two runs that are the same may differ."""


def measurements(interval: Sums, devices: Sequence[Any]) -> dict[str, float]:
    """Returns the `MEASUREMENTS` of some steps, as far as they are known.

    - "target_tokens_per_second", of all devices, and "target_tokens_per_second_per_device", without
      padding;
    - "mfu", the model FLOPs per second divided by the peak of the devices for bfloat16,
      if that is known;
    - "memory_bytes", the most memory that a device of this process has had in use so far, if that
      is known;
    - "data_wait_fraction", the fraction of the time that was spent waiting for batches.

    Args:
      interval: the sums of these steps.
      devices: all devices that train, of one kind; of several processes, of all processes.
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
