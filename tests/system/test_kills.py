"""A run that is killed repeatedly ends with the same bits as an uninterrupted one.

Its configuration has all kinds of state: accumulation, dropout, a moving average, early stopping,
length buckets, a mixture of corpora, sampling of subwords, and metrics of intervals that a kill
interrupts.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time

import chex
import orbax.checkpoint as ocp
import pytest

from flaxformer_mt.runs.checkpoint import whole_checkpoints
from flaxformer_mt.runs.metrics_file import read_metrics
from flaxformer_mt.training.reporting.metrics import MEASUREMENTS
from tests.system.small_runs import TINY_MODEL, xla_flags

# Orbax reads arrays here without being told where to put them.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

CONFIG = """
import dataclasses

from configs.quickstart import get_config as quickstart
from flaxformer_mt.config import CorpusConfig


def get_config():
    config = quickstart()
    corpora = (
        CorpusConfig(target_language="fr", tag="<2fr>"),
        CorpusConfig(target_language="de", tag="<2de>", weight=0.5),
    )
    data = dataclasses.replace(
        config.data,
        train_corpora=corpora,
        mixture_temperature=2.0,
        batching="buckets",
        bucket_lengths=(8, 64),
    )
    return dataclasses.replace(config, data=data)
"""
OPTIONS = (
    *TINY_MODEL,
    "--data.generated-pairs=1000",
    "--data.vocab-size=500",
    "--data.subword-sampling=0.1",
    "--train.batch-tokens=512",
    "--train.accumulation-steps=2",
    "--train.ema-decay=0.99",
    "--train.early-stopping-patience=1000",
    "--train.log-every=13",
    "--train.eval-sentences=2",
    "--train.show-translations=0",
    "--decode.beam-size=1",
    "--decode.max-length-factor=0",
    "--decode.max-length-extra=1",
)


@contextlib.contextmanager
def training(workdir, cache, steps, checkpoint_every):
    """A process of the run in `workdir`; killed at the end if it is still there."""
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    config = workdir.parent / "config.py"
    config.write_text(CONFIG)
    command = [sys.executable, "train.py", f"--config={config}", *OPTIONS]
    command += [
        f"--workdir={workdir}",
        f"--train.num-steps={steps}",
        f"--train.eval-every={steps // 2}",
        f"--train.checkpoint-every={checkpoint_every}",
    ]
    with (
        (workdir.parent / f"{workdir.name}.log").open("a") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def finish(workdir, cache, steps, checkpoint_every):
    """Lets the run go on to its end."""
    with training(workdir, cache, steps, checkpoint_every) as process:
        code = process.wait()
    assert code == 0, (workdir.parent / f"{workdir.name}.log").read_text()


def checkpoints(workdir):
    """Names of whole checkpoints, and `<step>.partial` for those that are being written."""
    names = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(workdir / "checkpoints"):
            if name.isdecimal():
                names.add(name)
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                inner = os.listdir(workdir / "checkpoints" / name)
                names |= {f"{name.split('.')[0]}.partial" for name in inner if name[0].isdigit()}
    return names


def newest_step(names):
    return max((int(name.split(".")[0]) for name in names), default=0)


def kill(process, workdir, step, rng):
    """Kills a process at its start, amid a save at about a step, or after it."""
    moment, before = rng.choice(["save", "any", "save", "start"]), checkpoints(workdir)
    if moment == "start":
        time.sleep(rng.uniform(0, 4))
    else:
        # A folder appears when a save begins, and gets another name when it ends.
        while newest_step(checkpoints(workdir) - before) < step:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.003)
        time.sleep(rng.uniform(0, 0.03 if moment == "save" else 1))
    process.kill()
    process.wait()


def result_of(workdir, steps):
    """All that a run leaves behind, but for times."""
    path = workdir / "checkpoints" / str(steps)
    with ocp.PyTreeCheckpointer() as orbax:
        state = {name: orbax.restore(path / name) for name in ("params", "ema", "training")}
    record = json.loads((path / "progress.json").read_text())
    record.pop("run")  # Each run has an identity of its own.
    for name in ("seconds", "seconds_waited"):
        record["progress"]["interval"].pop(name)
    metrics = [
        {name: value for name, value in line.items() if name not in MEASUREMENTS}
        for line in read_metrics(workdir / "metrics.jsonl")
    ]
    return state, record, metrics


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Of compilations, so that a restart is quick."""
    return tmp_path_factory.mktemp("compilations")


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path, cache):
    kills, steps, checkpoint_every = 20, 300, 10
    uninterrupted, workdir = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(uninterrupted, cache, steps, checkpoint_every=steps)
    rng = random.Random(kills)
    # Never so late that the run might end before it is killed.
    for step in sorted(rng.sample(range(1, steps - 120), kills)):
        with training(workdir, cache, steps, checkpoint_every) as process:
            kill(process, workdir, step, rng)
        assert newest_step(checkpoints(workdir)) < steps
    finish(workdir, cache, steps, checkpoint_every=steps)

    killed, whole = result_of(workdir, steps), result_of(uninterrupted, steps)
    assert max(line.get("compilations", 0) for line in whole[2]) == 2  # Buckets of both lengths.
    chex.assert_trees_all_equal(killed[0], whole[0])
    assert killed[1:] == whole[1:]
    assert list(whole_checkpoints(workdir, announce=pytest.fail))[-1] == steps
    assert all(name.isdecimal() for name in os.listdir(workdir / "checkpoints"))
