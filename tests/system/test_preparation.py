"""The command `prepare --workdir`: in processes, by shards, by Beam, and killed at any time."""

import sys

import pytest
from small_runs import flags

from flaxformer_mt.cli import main
from flaxformer_mt.run_layout import CACHE


def arguments(text, workdir):
    return ["prepare", *flags(text, workdir), "--data.drop-duplicates"]


def stores(workdir):
    return {
        path.relative_to(workdir): path.read_bytes()
        for path in sorted((workdir / CACHE).rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory):
    """A run that one process has prepared."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    assert main([*arguments(text, workdir), "--num-workers=1"]) == 0
    return workdir


@pytest.mark.slow
def test_processes_make_the_same_run(plain, text, tmp_path, capsys):
    workdir = tmp_path / "run"
    assert main([*arguments(text, workdir), "--num-workers=2"]) == 0
    output = capsys.readouterr()
    assert "300 pairs" in output.out
    assert f"train with: flaxformer-mt train --workdir={workdir}" in output.out
    assert output.err == ""
    assert stores(workdir) == stores(plain)
    for name in ("config.json", "tokenizer/joint.model", "data.json"):
        assert (workdir / name).read_bytes() == (plain / name).read_bytes()


@pytest.mark.slow
def test_shards_are_joined_by_training(plain, text, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    for shard in ("1/3", "2/3", "0/3"):
        assert main([*arguments(text, workdir), f"--shard={shard}"]) == 0
    assert not (workdir / CACHE / "train-0").exists()
    monkeypatch.setattr("flaxformer_mt.data.stream.store_parts._made", None)  # Nothing is missing.
    train = ["train", *flags(text, workdir), "--data.drop-duplicates", "--train.num-steps=1"]
    assert main(train) == 0
    assert stores(workdir) == stores(plain)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--shard=3/3", "--shard=3/3: give i/N"),
        ("--num-workers=-1", "--num-workers=-1 is negative"),
        ("--data.train-split=missing", "missing"),
    ],
)
def test_refusals(option, message, text, tmp_path, capsys):
    assert main([*arguments(text, tmp_path / "run"), option]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_process_that_fails_is_named(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "flaxformer_mt.cli.preparation._command",
        lambda arguments, index, count: [sys.executable, "-c", "raise SystemExit('no room')"],
    )
    assert main([*arguments(text, tmp_path / "run"), "--num-workers=2"]) != 0
    assert "a process that tokenizes has failed: no room" in capsys.readouterr().err
