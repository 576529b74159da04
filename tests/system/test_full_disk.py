"""On a full disk every command ends with one line, and leaves nothing incomplete behind.

The cheap cases are in tests/runs/test_checkpoint.py and tests/runs/test_atomic.py.
"""

import os
import shutil
import sys

import pytest
from full_disks import in_private_mounts
from small_runs import TINY_MODEL, xla_flags

from flaxformer_mt.runs.checkpoint import whole_checkpoints

pytestmark = pytest.mark.slow  # Each starts a program.

RUN = """
    mkdir -p "$1"
    mount -t tmpfs -o "size=$3k" tmpfs "$1"
    disk=$1 kept=$2
    shift 3
    code=0
    "$@" || code=$?
    cp -r "$disk" "$kept"
    exit $code
"""


def on_a_disk_of(kilobytes, tmp_path, *arguments):
    """Runs a command whose outputs are in `tmp_path / "disk"`.

    Returns its exit code and standard error, and a copy of the disk.
    """
    program = "import sys; from flaxformer_mt.cli import main; sys.exit(main())"
    result = in_private_mounts(
        RUN, tmp_path / "disk", tmp_path / "kept", kilobytes,
        sys.executable, "-c", program, *arguments,
        env={**os.environ, "XLA_FLAGS": xla_flags()},
    )  # fmt: skip
    return result.returncode, result.stderr, tmp_path / "kept"


# From the token store to a late checkpoint, each of which takes some 400 kB.
@pytest.mark.parametrize("kilobytes", [8, 40, 80, 120, 300, 520, 600, 800, 1300])
def test_train(tmp_path, kilobytes):
    code, error, kept = on_a_disk_of(
        kilobytes, tmp_path, "train", "--config=configs/quickstart.py", *TINY_MODEL,
        "--data.generated-pairs=1000", "--data.vocab-size=500", "--train.num-steps=8",
        "--train.batch-tokens=512", "--train.log-every=1", "--train.eval-every=4",
        "--train.checkpoint-every=2", "--train.keep-last=10", "--train.eval-sentences=2",
        "--train.show-translations=0", "--decode.beam-size=1", "--decode.max-length-factor=0",
        "--decode.max-length-extra=1", f"--workdir={tmp_path / 'disk' / 'run'}",
    )  # fmt: skip
    assert code == 1
    # Orbax may log the error of TensorStore before.
    last = error.splitlines()[-1]
    assert last.startswith("flaxformer-mt train: error: ")
    assert "No space left on device" in last
    assert error.count("flaxformer-mt train: error: ") == 1
    assert not [path for path in kept.rglob("*") if ".partial" in path.name]
    if (kept / "run").exists():
        whole_checkpoints(kept / "run", announce=pytest.fail)


@pytest.mark.parametrize("name", ["prepare", "convert", "average", "translate"])
def test_other_commands(trained_run, text, tmp_path, name):
    output = tmp_path / "disk" / "output"
    run = ["--run", trained_run]
    (tmp_path / "lines").write_text("the dog is old\n" * 800)
    arguments = {
        "prepare": ["prepare", "--path", text, "--splits", "train=train", "--output", output,
                    "--source-language", "en", "--target-language", "de"],
        "convert": ["convert", "--from", "flaxformer_mt", "--to", "marian", trained_run, output],
        "average": ["average", *run, "--last", "1", "--output", output],
        "translate": ["translate", *run, "--beam-size", "1", "--input", tmp_path / "lines",
                      "--output", output],
    }[name]  # fmt: skip
    code, error, kept = on_a_disk_of(8, tmp_path, *arguments)
    assert code == 1
    assert error.startswith("flaxformer-mt: error: ")
    assert "No space left on device" in error
    assert error.count("\n") == 1
    assert not list(kept.iterdir())
    shutil.rmtree(kept)
