"""The training scripts of docs/library.md and README.md, as they stand there, with small sizes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from documentation.pages import BLOCKS

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.trained_model import describe_run

SCRIPTS = {block.file: "\n".join(block.lines) for block in BLOCKS if block.file}
_PAIRS = load_corpus(DataConfig(corpus="phrases", generated_pairs=200), "train").pairs()
TEXT = "".join(f"{source}\t{target}\n" for source, target in _PAIRS)
SMALL = {
    "size=8000": "size=420",
    "d_model=256, num_heads=4, d_ff=1024,": (
        "d_model=32, num_heads=4, d_ff=64, num_encoder_layers=1, num_decoder_layers=1,"
    ),
    "rows=256, length=64": "rows=16, length=32",
    "% 1000 == 0": "% 4 == 0",
    "== 20_000": "== 12",
}


def run_script(folder, mesh, killed_at=None):
    """Runs the script in a process of its own, on 8 devices or, without a mesh, on one."""
    changes = SMALL | {"make_mesh(fsdp=2)": f"make_mesh({mesh})"}
    if killed_at is not None:
        changes["        if position.step =="] = (
            f"        if position.step == {killed_at}: __import__('os').kill("
            "__import__('os').getpid(), 9)\n        if position.step =="
        )
    return run_changed(SCRIPTS["script.py"], changes, folder, 8 if mesh else 1)


def run_changed(text, changes, folder, devices):
    """Runs a script with other sizes in a process of its own."""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "script.py").write_text(text)
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )


def whole_run(folder, mesh):
    """Makes a folder with the run of a script that nobody disturbs."""
    folder.mkdir()
    (folder / "mine.tsv").write_text(TEXT)
    done = run_script(folder, mesh)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 3  # translations
    return folder


@pytest.mark.slow
def test_the_script_of_the_readme_writes_a_run_that_translates(tmp_path):
    (tmp_path / "mine.tsv").write_text(TEXT)
    changes = {old: new for old, new in SMALL.items() if old != "% 1000 == 0"}
    done = run_changed(SCRIPTS["short.py"], changes, tmp_path, devices=1)
    assert done.returncode == 0, done.stderr[-2000:]
    model = fmt.load(tmp_path / "runs/mine-final")
    assert model.config.model.d_model == 32
    assert isinstance(model.translate("two hours"), str)


@pytest.mark.slow  # By default, tests/training/test_loop.py stops a run.
@pytest.mark.parametrize("mesh", ["fsdp=2, tensor=2", ""], ids=["8", "1"])
def test_a_killed_script_continues_with_the_same_bits(tmp_path, mesh):
    whole, killed = whole_run(tmp_path / "whole", mesh), tmp_path / "killed"
    killed.mkdir()
    (killed / "mine.tsv").write_text(TEXT)
    assert run_script(killed, mesh, killed_at=7).returncode == -signal.SIGKILL
    done = run_script(killed, mesh)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2
    hashes = {
        describe_run(folder / "runs/mine-final")["parameters_sha256"] for folder in (whole, killed)
    }
    assert len(hashes) == 1


@pytest.mark.slow
def test_the_folder_is_a_run_for_all_commands(tmp_path, monkeypatch, capsys):
    whole = whole_run(tmp_path / "whole", "fsdp=2, tensor=2")
    monkeypatch.chdir(whole)
    (whole / "source.txt").write_text("two days\n")
    main(["translate", "--run", "runs/mine-final", "--input", "source.txt", "--beam-size", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 1
    files = ["--source", "source.txt", "--reference", "source.txt"]
    main(["evaluate", "--run", "runs/mine-final", *files, "--beam-size", "1"])
    assert json.loads(capsys.readouterr().out)["sentences"] == 1
    main(
        ["convert", "--from", "flaxformer_mt", "--to", "torch", "runs/mine-final", "x.safetensors"]
    )
