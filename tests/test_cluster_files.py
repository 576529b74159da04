"""The scripts for clusters fit the command line, and the SLURM script requeues a stopped job."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from flaxformer_mt.cli.training import parse_flags

FOLDER = Path(__file__).parent.parent / "examples" / "cluster"
JOBSETS = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture
def submit(tmp_path):
    """Runs the SLURM script with programs of a cluster that note how they are called."""

    def run(code, arguments, **environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        checked = environment.pop("doctor", 0)
        for name, body in {
            "srun": f'case "$*" in *doctor*) exit {checked};; esac; exit {code}',
            "scontrol": "exit 0",
        }.items():
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n{body}\n')
            program.chmod(0o755)
        found = subprocess.run(
            ["bash", FOLDER / "slurm.sh", *arguments],
            env={
                **os.environ,
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_NTASKS": "16",
                "SLURM_JOB_ID": "7",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return found, calls.read_text().splitlines()

    return run


ARGUMENTS = ["--config=wmt14_en_de_big", "--workdir=/shared/a run"]


def test_a_job_is_checked_and_trains_with_a_batch_for_its_gpus(submit):
    found, (doctor, train) = submit(0, ARGUMENTS)
    assert found.returncode == 0
    assert doctor.endswith("flaxformer-mt doctor --workdir /shared/a run --cluster slurm")
    assert "--train.batch-tokens=262144 --config=wmt14_en_de_big --workdir=/shared/a run" in train


def test_a_job_that_was_stopped_is_queued_again(submit):
    found, calls = submit(75, ARGUMENTS, SLURM_RESTART_COUNT="1")
    assert found.returncode == 75
    assert [call.split()[0] for call in calls] == ["srun", "scontrol"]
    assert calls[-1] == "scontrol requeue 7"


@pytest.mark.parametrize("code", [1, 134])
def test_a_job_that_failed_is_not(submit, code):
    found, calls = submit(code, ARGUMENTS)
    assert found.returncode == code
    assert not any(call.startswith("scontrol") for call in calls)


def test_a_cluster_that_cannot_train_does_not(submit):
    found, calls = submit(0, ARGUMENTS, doctor=1)
    assert found.returncode == 1
    assert len(calls) == 1


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.stem)
def test_a_jobset_has_what_its_processes_say(path):
    jobset = yaml.safe_load(path.read_text())
    name = jobset["metadata"]["name"]
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (command,) = container["args"]
    words = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "1"))
    assert words[:3] == ["exec", "flaxformer-mt", "train"]
    flags = parse_flags(words[3:])
    (devices,) = container["resources"]["limits"].values()
    per_device = {"nvidia.com/gpu": 16384, "google.com/tpu": 8192}
    (kind,) = container["resources"]["limits"]
    total = devices * spec["completions"]
    assert flags.train.batch_tokens == per_device[kind] * total
    # Every device has the same number of rows.
    assert flags.train.batch_tokens // flags.data.target_row_length % total == 0
    assert str(flags.workdir).startswith(container["volumeMounts"][0]["mountPath"])
    if flags.cluster == "none":
        assert flags.num_processes == spec["completions"]
        port = container["ports"][0]["containerPort"]
        # JobSet names pods JOBSET-JOB-REPLICA-INDEX, in the subdomain JOBSET.
        assert flags.coordinator == f"{name}-{job['name']}-0-0.{name}:{port}"


def test_the_image_installs_extras_that_exist():
    extras = re.search(r"EXTRAS=(\S+)", (FOLDER / "Dockerfile").read_text())[1].split(",")
    project = (FOLDER.parent.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in (*extras, "cuda"))
