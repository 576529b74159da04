"""A run that is killed and continued, beside one that was not: bit for bit, or how far apart.

Two runs that nobody disturbs are compared as well: if they differ, operations of the device are not
deterministic, and what continuing adds cannot be told from that. Then all is repeated with
`--xla_gpu_exclude_nondeterministic_ops`, which leaves only what continuing does.
"""

import concurrent.futures
import dataclasses
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from battery_parts.options import Options, finish, start


def run(options: Options) -> Iterator[dict[str, Any]]:
    """Compares the runs; with deterministic operations they must be equal.

    Raises:
      RuntimeError: they are not.
    """
    results = {"as_usual": compare(options, "")}
    yield results
    if not options.tiny:
        results["deterministic"] = compare(options, "--xla_gpu_exclude_nondeterministic_ops=true")
        yield results
    last = list(results.values())[-1]
    if last["continued"]["parameters_that_differ"]:
        raise RuntimeError("the continued run differs though operations are deterministic")


def compare(options: Options, flags: str) -> dict[str, Any]:
    """Trains a run, another one like it, and one that is killed and continued."""
    root = options.out / f"continuing{'_deterministic' * bool(flags)}"
    shutil.rmtree(root, ignore_errors=True)  # Runs of an earlier battery would be continued.
    names = ["whole", "killed"] if options.tiny else ["whole", "again", "killed"]
    variables = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2",
    }

    def run_once(name: str) -> None:
        die = ["--die"] * (name == "killed")
        process = start(options, "--train", str(root / name), *die, **variables)
        if not die:
            finish(process)
            return
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"it ended with {process.returncode} before it was killed")

    # In sequence, the second finds the compiled programs of the first.
    with concurrent.futures.ThreadPoolExecutor(1 if options.tiny else len(names)) as pool:
        list(pool.map(run_once, names))
    finish(start(options, "--train", str(root / "killed"), **variables))
    results = {"continued": differences(root / "whole", root / "killed")}
    if "again" in names:
        results["undisturbed"] = differences(root / "whole", root / "again")
    return results


def train(folder: Path, tiny: bool, dies: bool) -> None:
    """Trains the run in a folder, or continues it; its process is killed if it `dies`."""
    from battery_parts.training_run import configuration
    from flaxformer_mt import experiment, runtime
    from flaxformer_mt.config import OptimizerConfig
    from flaxformer_mt.training.reporting.metrics import Writer

    class Killing(Writer):
        def write(self, step: int, split: str, values: Any, is_best: bool = False) -> None:
            if dies and step >= num_steps * 2 // 3:
                os.kill(os.getpid(), signal.SIGKILL)

    runtime.configure()
    config = configuration(Options(folder, tiny=tiny))
    num_steps = 12 if tiny else 300
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, dropout_rate=0.1, **({} if tiny else {"d_model": 512, "d_ff": 2048})
        ),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-3),
        train=dataclasses.replace(
            config.train,
            num_steps=num_steps,
            log_every=num_steps // 6,
            checkpoint_every=num_steps // 3,
            eval_every=num_steps,
            eval_sentences=1,
            trackers=(),
        ),
    )
    with experiment.open_folder(folder) as workdir:
        parts = experiment.prepare(config, workdir)
        # Without translations, whose programs take longer to compile than the run takes.
        validation = parts.validation
        validation.validate = lambda params: (validation.measure("valid", params), [])
        experiment.fit(parts, workdir, writers=[Killing()])


def differences(one: Path, other: Path) -> dict[str, Any]:
    """Compares the last checkpoints and the metrics of two runs."""
    import jax
    import numpy as np

    from flaxformer_mt.runs.checkpoint import restore_params
    from flaxformer_mt.runs.layout import METRICS
    from flaxformer_mt.runs.metrics_file import read_metrics
    from flaxformer_mt.training.reporting.metrics import MEASUREMENTS

    sides = [jax.device_get(restore_params(folder, "last")[1]) for folder in (one, other)]
    leaves = [dict(jax.tree.leaves_with_path(side)) for side in sides]
    apart = {
        jax.tree_util.keystr(path): float(np.max(np.abs(value - leaves[1][path])))
        for path, value in leaves[0].items()
    }
    lines = [
        [
            {name: value for name, value in line.items() if name not in MEASUREMENTS}
            for line in read_metrics(folder / METRICS)
        ]
        for folder in (one, other)
    ]
    first = next(
        (a["step"] for a, b in zip(*lines, strict=True) if a != b),
        None,
    )
    return {
        "parameters_that_differ": sorted(name for name, size in apart.items() if size),
        "largest_difference": max(apart.values()),
        "first_step_whose_metrics_differ": first,
    }
