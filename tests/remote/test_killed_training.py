"""A run in S3 that is killed, and continued on machines that have seen nothing of it."""

import os
import random
import shutil
import subprocess
import sys
import time

import chex
import pytest

from flaxformer_mt.remote.copies import new_copy
from flaxformer_mt.remote.stores import Store
from tests.system.small_runs import xla_flags
from tests.system.test_kills import CONFIG, OPTIONS, result_of

# Orbax reads arrays here without being told where to put them.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

# Leases end soon, and everything is published at once.
PROGRAM = """
import sys
from flaxformer_mt.cli import main
from flaxformer_mt.remote import lease, run_folders
lease.SECONDS, run_folders._PERIOD_SECONDS = 2.0, 0.2
sys.exit(main(["train", *sys.argv[1:]]))
"""
STEPS = 120


def training(workdir, tmp_path, cache):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    log = tmp_path / f"{cache}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
        [
            sys.executable, "-c", PROGRAM, f"--config={config}", *OPTIONS, f"--workdir={workdir}",
            f"--train.num-steps={STEPS}", f"--train.eval-every={STEPS // 2}",
            "--train.checkpoint-every=5",
        ],
        env={
            **os.environ,
            "XLA_FLAGS": xla_flags(),
            "XDG_CACHE_HOME": str(tmp_path / cache),
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=output,
        stderr=output,
    )  # fmt: skip
    return process, log


def steps_in(url):
    """Returns the steps of the checkpoints that are complete there."""
    names = [name.split("/") for name in Store(url).list() if name.endswith("/manifest.json")]
    return [int(parts[1]) for parts in names if parts[0] == "checkpoints"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_and_continued_elsewhere(s3_url, tmp_path):
    local = tmp_path / "uninterrupted"
    process, log = training(local, tmp_path, "local")
    assert process.wait(timeout=900) == 0, log.read_text()

    rng = random.Random(1)
    for number, step in enumerate([5, 30, 60, 90]):
        process, log = training(s3_url, tmp_path, f"machine-{number}")
        while process.poll() is None and max(steps_in(s3_url), default=0) < step:
            time.sleep(0.05)
        assert process.poll() is None, log.read_text()
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.wait()
        time.sleep(2.5)  # Until its lease has ended.
        shutil.rmtree(tmp_path / f"machine-{number}")
    process, log = training(s3_url, tmp_path, "last")
    assert process.wait(timeout=900) == 0, log.read_text()
    with new_copy(s3_url) as copy:
        copy.download()
        expected, found = result_of(local, STEPS), result_of(copy.local, STEPS)
    chex.assert_trees_all_equal(found[0], expected[0])
    assert found[1:] == expected[1:]
