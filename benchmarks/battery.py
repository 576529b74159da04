"""Everything that only a device can show, in one command and at most nine minutes.

    python benchmarks/battery.py --out DIR [--data MULTI30K] [--tiny]
    python benchmarks/battery.py --out DIR --write-docs [--compilers FILE ...]

runs these parts on the first GPU, in the order of what matters, each in a process of its own with a
time limit. DIR/PART.json is written as soon as a part ends: its results, or why it failed and what
was known until then.

    parity             all families against PyTorch, float32 with exact products, and bfloat16
    attention          fused attention against `einsum`: loss, gradients, time
    training_speed     base and big in bfloat16 beside a lean PyTorch, in turns; MFU, compile time
    decoding_speed     beside `generate` of transformers, in bfloat16
    training_run       Multi30k to its end, with BLEU (without --data: reversed digits)
    continuing         a run that is killed and continued, to the bit

A part that fails does not stop the others; the exit code is 1 then. `--tiny` runs all of it on
CPUs, with models that are too small to measure anything. `--write-docs` writes docs/accelerators.md
from the results in DIR.

Needed are the dependencies of training (but for tensorboardX, num2words and Babel), PyTorch and
transformers. The package need not be installed.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from battery_parts import accelerators_page, continuing, device, parity
from battery_parts.options import Options, environment

PARTS = {
    "parity": 80,
    "attention": 50,
    "training_speed": 180,
    "decoding_speed": 80,
    "training_run": 90,
    "continuing": 60,
}
"""The parts in their order, with their time limits in seconds."""


def run_part(name: str, options: Options, limit: float) -> dict[str, Any]:
    """Runs a part in a process of its own, and returns what is written about it."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, *options.arguments(), "--part", name],
        env=environment(options.tiny),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # So that its own processes can be ended with it.
    )
    result: dict[str, Any] = {"status": "done"}
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        result = {"status": "timed out", "reason": f"it took more than {limit:.0f} seconds"}
    else:
        if process.returncode:
            last = errors.splitlines()[-1:]
            reason = " ".join(["exit code", f"{process.returncode}:", *last])
            result = {"status": "failed", "reason": reason}
    if result["status"] != "done":
        result["end_of_output"] = errors.splitlines()[-30:]
    complete, _, _ = output.rpartition("\n")
    found = json.loads(complete.splitlines()[-1]) if complete else {}
    return {"part": name, "seconds": time.perf_counter() - begin, **result, **found}


def run_in_this_process(name: str, options: Options) -> None:
    """Runs a part, and prints its results, and before that what is known so far, in lines."""
    from flaxformer_mt import runtime

    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is not the result.
    runtime.configure()
    for found in importlib.import_module(f"battery_parts.{name}").run(options):
        line = json.dumps({"device": device.describe(), "results": found})
        print(line, file=results, flush=True)


def main() -> int:
    """Runs the battery, or a part of it, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", type=Path, help="folder of Multi30k: train.en, train.de ...")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9, help="time limit of all parts")
    parser.add_argument("--tiny", action="store_true", help="on CPUs, too small to measure")
    parser.add_argument("--write-docs", action="store_true", help="write docs/accelerators.md")
    parser.add_argument("--compilers", type=Path, nargs="*", default=[], help="JSON files")
    for hidden in ("--part", "--family", "--train"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--die", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    options = Options(given.out.absolute(), given.data and given.data.absolute(), given.tiny)
    if given.part:
        run_in_this_process(given.part, options)
        return 0
    if given.family:
        print(json.dumps(parity.family(given.family)))
        return 0
    if given.train:
        continuing.train(Path(given.train), given.tiny, given.die)
        return 0
    if given.write_docs:
        accelerators_page.write(options.out, given.compilers)
        return 0

    options.out.mkdir(parents=True, exist_ok=True)
    begin, failed = time.perf_counter(), []
    for name in given.parts:
        left = 60 * given.minutes - (time.perf_counter() - begin)
        limit = left if options.tiny else min(PARTS[name], left)
        result = run_part(name, options, max(limit, 1))
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name:<16}{result['status']:<10}{result['seconds']:>6.1f} s", flush=True)
        if result["status"] != "done":
            print(f"  {result['reason']}", flush=True)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
