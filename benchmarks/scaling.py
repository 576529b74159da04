"""What does a training step need of each of many devices, and what do they send to each other?

    python benchmarks/scaling.py [--models base,big] [--devices 8,64] [--json FILE] [--write]

Compiles training steps ahead of time for simulated CPU devices: no model is ever made and no step
run, so that any machine will do. Prints a table; --write puts it into docs/scaling.md.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from flaxformer_mt.config import (
    ExperimentConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)

VOCAB, LENGTH = 32_000, 64
DOC = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- table of benchmarks/scaling.py -->", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how much of a batch each device gets."""

    model: TransformerConfig
    rows: int
    """Rows of 64 source and 64 target tokens for each device."""


def transformer(**fields: object) -> TransformerConfig:
    return TransformerConfig(source_vocab_size=VOCAB, target_vocab_size=VOCAB, **fields)


SIZES = {
    "base": Size(transformer(), rows=64),
    "big": Size(transformer(d_model=1024, num_heads=16, d_ff=4096), rows=64),
    "1B": Size(
        transformer(
            d_model=2048,
            num_heads=32,
            d_ff=8192,
            num_encoder_layers=8,
            num_decoder_layers=8,
            remat="full",
        ),
        rows=32,
    ),
}
LAYOUTS = {
    8: [{}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}],
    64: [{}, {"fsdp": 8}, {"fsdp": 64}, {"fsdp": 8, "tensor": 2}],
    512: [{}, {"fsdp": 8}, {"fsdp": 64}, {"fsdp": 64, "tensor": 2}],
}
"""For each number of devices, meshes: what fsdp and tensor leave over is the axis data."""


def measure(name: str, num_devices: int) -> list[dict]:
    """Measures one model on all devices of this process; returns a dict for each mesh."""
    import jax

    from flaxformer_mt.data.stream.batches import BatchShape
    from flaxformer_mt.model.transformer import Transformer
    from flaxformer_mt.training.memory import step_cost
    from flaxformer_mt.training.optimizer import make_optimizer, make_schedule
    from flaxformer_mt.training.parallel import make_strategy
    from flaxformer_mt.training.state import create_state
    from flaxformer_mt.training.step import train_step

    size, measurements = SIZES[name], []
    for layout in LAYOUTS[num_devices]:
        rows = size.rows * num_devices
        config = ExperimentConfig(
            model=size.model,
            train=TrainConfig(batch_tokens=rows * LENGTH),
            parallel=ParallelConfig(**layout),
        )
        model = Transformer(config.model)
        schedule = make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
        optimizer = make_optimizer(config.optimizer, schedule)
        make_state = functools.partial(create_state, model, optimizer, config.train)
        cost = step_cost(
            make_strategy(config),
            make_state,
            functools.partial(train_step, model=model, optimizer=optimizer, config=config.train),
            BatchShape(rows, LENGTH, LENGTH),
            optimize=False,
        )
        params = jax.eval_shape(make_state).params
        measurements.append(
            {
                "model": name,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
                "devices": num_devices,
                "mesh": {"data": num_devices // _product(layout), **layout},
                "rows_per_device": size.rows,
                "bytes": {**dataclasses.asdict(cost), "total": cost.total},
            }
        )
    return measurements


def _product(layout: dict[str, int]) -> int:
    return layout.get("fsdp", 1) * layout.get("tensor", 1)


def measure_in_process(name: str, num_devices: int) -> list[dict]:
    """The same in a process of its own, as a process cannot change how many devices it has."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    command = [sys.executable, __file__, "--worker", "--models", name, "--devices"]
    output = subprocess.run(
        [*command, str(num_devices)], env=environment, stdout=subprocess.PIPE, check=True
    ).stdout
    return json.loads(output)


def table(measurements: list[dict]) -> str:
    """The measurements as Markdown, in units of 10^9 bytes."""
    lines = [
        "| model | devices | mesh | parameters | optimizer | temporary | total "
        "| sent: gathering | sent: adding up | sent: other |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measurements:
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        cost, sent = row["bytes"], row["bytes"]["sent"]
        adding = sent.get("all-reduce", 0) + sent.get("reduce-scatter", 0)
        other = sum(sent.values()) - adding - sent.get("all-gather", 0)
        cells = [
            cost["parameters"],
            cost["optimizer_state"],
            cost["temporary"],
            cost["total"],
            sent.get("all-gather", 0),
            adding,
            other,
        ]
        label = f"{row['model']} ({row['parameters'] / 1e6:,.0f} M)"
        lines.append(
            f"| {label} | {row['devices']} | {mesh} | "
            + " | ".join(f"{cell / 1e9:.2f}" for cell in cells)
            + " |"
        )
    return "\n".join(lines)


def write(text: str) -> None:
    """Replaces the table in the documentation."""
    before, _, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIZES), help="of base, big, 1B")
    parser.add_argument("--devices", default=",".join(map(str, LAYOUTS)), help="of 8, 64, 512")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scaling.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models, devices = arguments.models.split(","), list(map(int, arguments.devices.split(",")))
    if arguments.worker:
        print(json.dumps(measure(models[0], devices[0])))
        return
    measurements = [
        row for model in models for count in devices for row in measure_in_process(model, count)
    ]
    print(table(measurements))
    if arguments.json:
        arguments.json.write_text(json.dumps(measurements, indent=2) + "\n", encoding="utf-8")
    if arguments.write:
        write(table(measurements))


if __name__ == "__main__":
    main()
