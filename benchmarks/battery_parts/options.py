"""What the battery was asked for, and what its parts share."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

BATTERY = Path(__file__).parents[1] / "battery.py"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the battery."""

    out: Path
    """Folder of the results."""
    data: Path | None = None
    """Folder of Multi30k, or None."""
    tiny: bool = False
    """Whether everything is so small that it runs on a CPU in seconds."""

    def arguments(self) -> list[str]:
        """The options, as the command line has them."""
        data = [f"--data={self.data}"] if self.data else []
        return [f"--out={self.out}", *data, *["--tiny"] * self.tiny]


def environment(tiny: bool) -> dict[str, str]:
    """The environment of the processes; PyTorch gets what JAX leaves of a GPU's memory."""
    paths = [str(BATTERY.parents[1]), os.environ.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if tiny:
        return (
            os.environ
            | path
            | {
                "JAX_PLATFORMS": "cpu",
                "CUDA_VISIBLE_DEVICES": "",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # Compiles in half the time.
            }
        )
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"} | os.environ | path


def start(options: Options, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Starts a process of the battery with more arguments and environment variables."""
    return subprocess.Popen(
        [sys.executable, str(BATTERY), *options.arguments(), *arguments],
        env=environment(options.tiny) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a process, and returns what it printed.

    Raises:
      RuntimeError: it failed; ends with the last lines of its errors.
    """
    output, errors = process.communicate()
    if process.returncode:
        last = "\n".join(errors.splitlines()[-20:])
        raise RuntimeError(f"a process ended with exit code {process.returncode}: {last}")
    return output
