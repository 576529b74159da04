"""Measures how long `flaxformer-mt translate` takes to answer lines that arrive in a pipe.

    python benchmarks/latency.py --run runs/first_hour --input source.txt

A client writes lines at a fixed rate; the latency of a line is the time from its writing to its
translation. The same lines in a file give the throughput.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

START = "import sys; from flaxformer_mt.cli import main; sys.exit(main())"


def latencies(command: Sequence[str], lines: Sequence[bytes], rate: float) -> list[float]:
    """Returns the seconds between the writing of each line and its translation.

    Args:
      command: reads lines, and writes a line for each.
      lines: are repeated before they are measured, so that all programs are compiled.
      rate: lines per second.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        written: list[float] = []

        def write(count: int) -> None:
            start = time.monotonic()
            for number, line in enumerate(lines[:count]):
                time.sleep(max(0, start + number / rate - time.monotonic()))
                written.append(time.monotonic())
                stdin.write(line)
                stdin.flush()

        found: list[float] = []
        for _ in range(2):
            written.clear()
            writer = threading.Thread(target=write, args=[len(lines)])
            writer.start()
            found = []
            for number in range(len(lines)):
                stdout.readline()
                found.append(time.monotonic() - written[number])
            writer.join()
        stdin.close()
        assert process.wait() == 0
    return found


def main() -> None:
    """Prints a table of latencies by rate, and the throughput of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="a run folder")
    parser.add_argument("--input", required=True, type=Path, help="source sentences")
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 100, 1000])
    parser.add_argument("--seconds", type=float, default=10, help="of writing, for each rate")
    options, others = parser.parse_known_args()
    command = [sys.executable, "-c", START, "translate", "--run", options.run, *others]
    lines = options.input.read_bytes().splitlines(keepends=True)
    print("lines/s  median  worst  (seconds)")
    for rate in options.rates:
        number = max(10, round(rate * options.seconds))
        given = (lines * (number // len(lines) + 1))[:number]
        found = latencies(command, given, rate)
        print(f"{rate:7g}  {statistics.median(found):6.3f}  {max(found):5.3f}", flush=True)
    start = time.monotonic()
    subprocess.run([*command, "--input", options.input], stdout=subprocess.DEVNULL, check=True)
    print(f"a file of {len(lines)} lines: {len(lines) / (time.monotonic() - start):.1f} lines/s")


if __name__ == "__main__":
    main()
