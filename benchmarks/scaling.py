"""What does a training step need of each of many GPUs or TPUs, and what do they send?

    python benchmarks/scaling.py --device h100 --json FILE [--models base,big] [--devices 8,64]
    python benchmarks/scaling.py --json FILE --write

Compiles training steps as `benchmarks/accelerators.py` does, each in its own process. No device
is needed. The measurements are added to those in FILE, because the compilers for GPUs and for TPUs
need different virtual environments; --write puts the table of all of them into docs/scaling.md.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from compiled.targets import DEVICES

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- table of benchmarks/scaling.py -->", "<!-- end of table -->"
VOCABULARY = 32_000

CONFIGURATION = """\
from flaxformer_mt.config import DataConfig, ExperimentConfig, TransformerConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=TransformerConfig(dtype="bfloat16", scan_layers=True, {fields}),
        data=DataConfig(source_row_length=256, target_row_length=256),
    )
"""
MODELS = {
    "base": "",
    "big": "d_model=1024, num_heads=16, d_ff=4096, dropout_rate=0.3",
    "1B": "d_model=2048, num_heads=32, d_ff=8192, num_encoder_layers=8, num_decoder_layers=8, "
    'remat="products"',
}
POSITIONS = {
    ("base", "h100"): 16_384,
    ("big", "h100"): 16_384,
    ("base", "v5p"): 16_384,
    ("big", "v5p"): 16_384,
}
"""Target positions for each of data * fsdp; 8,192 for others."""

# Mesh and topology. Along TPUs, fsdp and tensor are lines of the torus.
GPU_LAYOUTS = {
    1: [("data=1", "1x1x1")],
    8: [("data=8", "1x1x8"), ("fsdp=8", "1x1x8"), ("fsdp=4,tensor=2", "1x1x8")],
    64: [("data=8,fsdp=8", "1x8x8")],
    256: [("data=32,fsdp=8", "1x32x8")],
    512: [("data=64,fsdp=8", "1x64x8")],
}
LAYOUTS = {
    "h100": GPU_LAYOUTS,
    "h200": GPU_LAYOUTS,
    "a100": GPU_LAYOUTS,
    "v5e": {
        1: [("data=1", "2x2")],
        16: [("data=16", "4x4"), ("data=4,fsdp=4", "4x4")],
        256: [("data=16,fsdp=16", "16x16")],
    },
    "v5p": {
        1: [("data=1", "2x2x1")],
        8: [("data=2,fsdp=4", "2x2x2")],
        64: [("data=16,fsdp=4", "4x4x4"), ("data=4,fsdp=4,tensor=4", "4x4x4")],
        512: [("data=64,fsdp=8", "8x8x8")],
    },
    "v6e": {1: [("data=1", "2x2")], 16: [("data=4,fsdp=4", "4x4")]},
}
"""By device, for each number of devices."""


def measure(model: str, device: str, mesh: str, topology: str) -> dict:
    """Compiles one step in a process of its own; returns what `accelerators.py` measures."""
    with tempfile.TemporaryDirectory() as folder:
        config, result = Path(folder) / f"{model}.py", Path(folder) / "measured.json"
        config.write_text(CONFIGURATION.format(fields=MODELS[model]), encoding="utf-8")
        command = [sys.executable, ROOT / "benchmarks" / "accelerators.py", "--steps=training"]
        options = {
            "config": config,
            "device": device,
            "mesh": mesh,
            "topology": topology,
            "target-tokens": POSITIONS.get((model, device), 8_192),
            "vocabulary": VOCABULARY,
            "json": result,
        }
        given = [f"--{name}={value}" for name, value in options.items()]
        subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL)
        measured = json.loads(result.read_text(encoding="utf-8"))["training"]
    return measured | {"config": model}


def table(measurements: list[dict]) -> str:
    """The measurements as Markdown, in GiB of memory and 10^9 bytes sent."""
    lines = [
        "| model | devices | mesh | positions | parameters | optimizer | temporary | total "
        "| bound | sent: gathering | sent: gradients, float32 | sent: other | waits |",
        "|" + "---|" * 13,
    ]
    order = [*MODELS], [*DEVICES]
    for row in sorted(
        measurements,
        key=lambda row: (
            order[0].index(row["config"]),
            order[1].index(row["device"]),
            math.prod(row["mesh"].values()),
        ),
    ):
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        gathering = gradients = total = waiting = 0.0
        for each in row["collectives"]:
            total += each["sent"]
            waiting += 0 if each["asynchronous"] else each["sent"]
            gathering += each["sent"] if each["kind"] == "all-gather" else 0
            is_sum = each["kind"] in ("all-reduce", "reduce-scatter")
            gradients += each["sent"] if is_sum and each["dtypes"] == "f32" else 0
        sizes = [row["parameters"], row["optimizer_state"], row["temporary"]]
        sizes.append(row["arguments"] + row["temporary"])
        sent = [gathering, gradients, total - gathering - gradients, waiting]
        cells = [
            row["config"],
            f"{math.prod(row['mesh'].values())} {row['device']}",
            mesh or "-",
            f"{row['target_positions_per_device']:,}",
            *(f"{size / 2**30:.2f}" for size in sizes),
            f"{row['bound'] * 1e3:.1f} ms",
            *(f"{size / 1e9:.2f}" for size in sent),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(text: str) -> None:
    """Replaces the table in the documentation."""
    before, _, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, help="what to compile for; default: nothing")
    parser.add_argument("--models", default=",".join(MODELS), help="of base, big, 1B")
    parser.add_argument("--devices", help="numbers of devices; default: all in the script")
    parser.add_argument("--mesh", help="only this mesh, as in the script: data=8")
    parser.add_argument("--json", type=Path, required=True, help="where measurements are kept")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scaling.md")
    arguments = parser.parse_args()

    wanted = arguments.devices.split(",") if arguments.devices else None
    for count, layouts in LAYOUTS.get(arguments.device, {}).items():
        for mesh, topology in layouts:
            if (wanted and str(count) not in wanted) or arguments.mesh not in (None, mesh):
                continue
            for model in arguments.models.split(","):
                measured = measure(model, arguments.device, mesh, topology)
                kept = read(arguments.json)
                key = [measured[name] for name in ("config", "device", "topology", "mesh")]
                kept = [
                    row
                    for row in kept
                    if [row[name] for name in ("config", "device", "topology", "mesh")] != key
                ]
                text = json.dumps([*kept, measured], indent=2)
                arguments.json.write_text(text + "\n", encoding="utf-8")
    print(table(read(arguments.json)))
    if arguments.write:
        write(table(read(arguments.json)))


def read(path: Path) -> list[dict]:
    """Reads the measurements made so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


if __name__ == "__main__":
    main()
