"""What do the compilers for GPUs and TPUs make of a configuration? No device is needed.

    python benchmarks/accelerators.py --config configs/wmt14_en_de_base.py --device h100

Compiles the training step, and one step of the search, for devices that need not be there. Prints
memory, matrix products, bytes moved, kernels, communication, the least time that the step can take
("bound": kernel by kernel, the larger of its products at the peak rate and its bytes at the peak
bandwidth), and the modules that take most of it. These numbers are the same on every machine. The
compilers are those of `pip install 'jax[cuda13]'` and `jax[tpu]`, each in a virtual environment of
its own.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compiled.targets import DEVICES, default_topology, describe, prepare

from flaxformer_mt.accelerators import ACCELERATORS
from flaxformer_mt.errors import UserError
from flaxformer_mt.runtime import set_xla_flags

AXES = ("data", "fsdp", "tensor")
STEPS = ("training", "decoding")
NUM_GROUPS = 10
GIB = 2**30


def parse_mesh(text: str) -> dict[str, int]:
    """Parses "data=8,fsdp=4"; axes that are not named have the size 1."""
    mesh = dict.fromkeys(AXES, 1)
    for item in filter(None, text.split(",")):
        axis, _, size = item.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh={text}: write data=N,fsdp=N,tensor=N")
        mesh[axis] = int(size)
    return mesh


def measure(arguments: argparse.Namespace) -> dict[str, dict]:
    """Compiles the steps; returns their measurements by name, and writes the programs."""
    mesh = parse_mesh(arguments.mesh)
    wanted = math.prod(mesh.values())
    topology = arguments.topology or default_topology(arguments.device, wanted)
    prepare(arguments.device, topology)
    set_xla_flags(os.environ, importlib.metadata.version("jaxlib"))

    from compiled.steps import compile_decoding, compile_training, on_mesh

    from flaxformer_mt.config.files import load_config

    devices = describe(arguments.device, topology)
    if not arguments.mesh and arguments.topology:
        wanted = mesh["data"] = len(devices)
    if wanted > len(devices):
        raise UserError(f"--mesh={arguments.mesh} needs {wanted} devices, {topology} has fewer")
    given = load_config(arguments.config)
    config = on_mesh(given, mesh, arguments.target_tokens, arguments.vocabulary)
    facts = {
        "config": arguments.config,
        "device": arguments.device,
        "topology": topology,
        "mesh": mesh,
        "target_positions_per_device": config.train.batch_tokens // (mesh["data"] * mesh["fsdp"]),
        "jax": importlib.metadata.version("jax"),
    }
    found = {}
    for name in arguments.steps.split(","):
        if name == "training":
            step = compile_training(config, devices[:wanted])
        else:
            alone = dataclasses.replace(config.parallel, fsdp=1, tensor=1)
            step = compile_decoding(dataclasses.replace(config, parallel=alone), devices[0])
        if arguments.program:
            program_file(arguments.program, name).write_text(step.text, encoding="utf-8")
        sizes = {key: value for key, value in step._asdict().items() if key != "text"}
        found[name] = {**facts, **sizes, **analyse(step.text, arguments.device)}
    return found


def program_file(path: Path, step: str) -> Path:
    """Returns where the program of a step is written; that of training has the given name."""
    return path if step == "training" else path.with_name(f"{path.stem}.{step}{path.suffix}")


def analyse(text: str, device: str) -> dict[str, Any]:
    """Measures a program, per device and run."""
    from compiled.modules import groups
    from compiled.program import collectives, parse, unordered_sums
    from compiled.roofline import kernels

    program, peak = parse(text), ACCELERATORS[device]
    found = kernels(program)
    bound = sum(kernel.seconds(peak) for kernel in found)
    flops = sum(kernel.flops for kernel in found)
    communication: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
    for each in collectives(program):
        types = "+".join(dict.fromkeys(each.dtypes))
        total = communication[each.kind, types, each.is_asynchronous]
        total[0] += each.times
        total[1] += each.times * each.sent
    return {
        "flops": flops,
        "bytes": sum(kernel.bytes for kernel in found),
        "kernels": sum(kernel.times for kernel in found),
        "bound": bound,
        "share_of_peak": flops / peak.flops / bound,
        "unordered_sums": [f"{each.opcode} {each.source}" for each in unordered_sums(program)],
        "collectives": [
            {"kind": kind, "dtypes": types, "asynchronous": is_async, "times": times, "sent": sent}
            for (kind, types, is_async), (times, sent) in sorted(communication.items())
        ],
        "groups": [group._asdict() for group in groups(found, peak)],
    }


def report(name: str, step: dict) -> Iterator[str]:
    """Yields the lines of one step."""
    devices = math.prod(step["mesh"].values())
    mesh = " x ".join(f"{axis} {size}" for axis, size in step["mesh"].items() if size > 1)
    memory = ACCELERATORS[step["device"]].memory
    total = step["arguments"] + step["temporary"]
    yield (
        f"{name} step of {step['config']}, {step['device']} {step['topology']}"
        + (f" ({mesh})" if mesh and name == "training" else "")
        + f", compiled in {step['seconds']:.0f} s"
    )
    if name == "training":
        yield f"  {step['target_positions_per_device']:,} target positions per device"
    yield (
        f"  memory per device: parameters {step['parameters'] / GIB:.3f} GiB, optimizer "
        f"{step['optimizer_state'] / GIB:.3f}, temporary {step['temporary'] / GIB:.3f}; all "
        f"{total / GIB:.2f} of {memory / GIB:.0f}"
    )
    yield (
        f"  products {step['flops'] / 1e12:.3f} Tflop, moved {step['bytes'] / 1e9:.2f} GB, "
        f"{step['kernels']:,} kernels"
    )
    share = f"{step['share_of_peak']:.1%} of the peak"
    if step["equations"]:
        peak = ACCELERATORS[step["device"]].flops
        own = step["equations"] / devices / peak / step["bound"]
        share += f" ({own:.1%} with the products of the equations only)"
    yield f"  bound {step['bound'] * 1e3:.2f} ms, {share}"
    for each in step["collectives"]:
        way = "asynchronous" if each["asynchronous"] else "waits"
        yield (
            f"  {each['times']:4d} {each['kind']} of {each['dtypes']}: sends "
            f"{each['sent'] / 1e6:,.2f} MB, {way}"
        )
    for operation in step["unordered_sums"]:
        yield f"  may add in another order in every run: {operation}"
    yield "       ms  share       GB   Tflop  kernels  module"
    for group in step["groups"][:NUM_GROUPS]:
        yield (
            f"  {group['seconds'] * 1e3:7.3f} {group['seconds'] / step['bound']:6.1%} "
            f"{group['bytes'] / 1e9:8.2f} {group['flops'] / 1e12:7.3f} {group['kernels']:8,d}  "
            f"{group['name']}"
        )


def comparison(name: str, old: dict, new: dict) -> Iterator[str]:
    """Yields the lines that show a step of two checkouts side by side."""
    yield f"{name} step                                   before        after    ratio"
    rows = [
        ("bound, ms", "bound", 1e3),
        ("moved, GB", "bytes", 1e-9),
        ("products, Tflop", "flops", 1e-12),
        ("kernels", "kernels", 1),
        ("temporary, GiB", "temporary", 1 / GIB),
    ]
    for label, key, unit in rows:
        yield _compared(label, old[key] * unit, new[key] * unit)
    sent = [sum(each["sent"] for each in step["collectives"]) / 1e6 for step in (old, new)]
    yield _compared("sent, MB", *sent)
    before, after = (
        {group["name"]: group["seconds"] * 1e3 for group in step["groups"]} for step in (old, new)
    )
    for group in sorted(before | after, key=lambda name: -before.get(name, 0)):
        yield _compared(f"{group}, ms", before.get(group, 0.0), after.get(group, 0.0))


def _compared(label: str, old: float, new: float) -> str:
    ratio = f"{new / old:8.2f}" if old else "       -"
    return f"  {label:40s} {old:10,.2f} {new:12,.2f} {ratio}"


@contextlib.contextmanager
def checkout(name: str) -> Iterator[Path]:
    """Yields the folder of a checkout, or of a commit, which is checked out for the time being."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(root), "worktree"]
        added = subprocess.run(
            [*command, "add", "--quiet", "--detach", folder, name], capture_output=True, text=True
        )
        if added.returncode:
            raise UserError(f"--compare={name} is neither a folder nor a commit")
        try:
            yield Path(folder)
        finally:
            subprocess.run([*command, "remove", "--force", folder], check=True)


def measure_other(arguments: argparse.Namespace) -> dict[str, dict]:
    """Measures another checkout: its programs, analysed by this one."""
    with checkout(arguments.compare) as folder, tempfile.TemporaryDirectory() as results:
        script, text = folder / "benchmarks" / "accelerators.py", Path(results) / "program.txt"
        if not script.exists():
            raise UserError(f"--compare={arguments.compare} is older than this benchmark")
        output = Path(results) / "measured.json"
        given = vars(arguments) | {"program": text, "json": output, "compare": None}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value]
        subprocess.run(
            [sys.executable, str(script), *options],
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
        )
        measured = json.loads(output.read_text(encoding="utf-8"))
        for name, step in measured.items():
            program = program_file(text, name).read_text(encoding="utf-8")
            step.update(analyse(program, arguments.device))
        return measured


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a file of configs/")
    parser.add_argument("--device", choices=DEVICES, default="h100")
    parser.add_argument(
        "--topology",
        help="TPUs: chips along each axis, 4x4; GPUs: slices x hosts x GPUs of a host, 1x1x8",
    )
    parser.add_argument(
        "--target-tokens",
        type=int,
        default=0,
        help="target positions of a step for each of data * fsdp (default: as configured)",
    )
    parser.add_argument("--mesh", default="", help="data=N,fsdp=N,tensor=N")
    parser.add_argument("--vocabulary", type=int, default=0, help="default: as configured")
    parser.add_argument("--steps", default=",".join(STEPS), help="training, decoding or both")
    parser.add_argument("--program", type=Path, help="write the compiled text here")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--compare", help="a commit or a checkout, to compile as well")
    arguments = parser.parse_args()
    try:
        other = measure_other(arguments) if arguments.compare else {}
        measured = measure(arguments)
    except UserError as error:
        sys.exit(f"error: {error}")
    for name, step in measured.items():
        print(*report(name, step), sep="\n")
        if other:
            print(*comparison(name, other[name], step), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
