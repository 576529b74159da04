"""No option takes a path of a remote store silently: a line says that it is not supported."""

import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import read_bytes, require_local
from flaxformer_mt.runs import atomic

REMOTE = "gs://bucket/some/thing"
COMMANDS = {
    "train": ["train", "--config=configs/quickstart.py", f"--workdir={REMOTE}"],
    "a dry run": ["train", "--config=configs/quickstart.py", f"--workdir={REMOTE}", "--dry-run"],
    "its configuration": ["train", f"--config={REMOTE}.py", "--workdir=run"],
    "its text": ["train", "--config=configs/quickstart.py", "--workdir=run",
                 "--data.corpus=text", f"--data.path={REMOTE}"],
    "its vocabulary": ["train", "--config=configs/quickstart.py", "--workdir=run",
                       f"--data.tokenizer-path={REMOTE}"],
    "its parameters": ["train", "--config=configs/quickstart.py", "--workdir=run",
                       f"--train.init-from={REMOTE}"],
    "its teacher": ["train", "--config=configs/quickstart.py", "--workdir=run",
                    f"--train.teacher={REMOTE}"],
    "translate": ["translate", f"--run={REMOTE}"],
    "score": ["score", f"--run={REMOTE}", "--source=a", "--target=b"],
    "inspect": ["inspect", f"--run={REMOTE}"],
    "average": ["average", f"--run={REMOTE}", "--last=2"],
    "evaluate": ["evaluate", f"--hypothesis={REMOTE}", f"--reference={REMOTE}"],
    "convert": ["convert", "--from=marian", REMOTE, "run"],
    "convert a file": ["convert", "--from=torch", f"{REMOTE}.pt", "out.safetensors"],
    "plot": ["plot", f"--run={REMOTE}", "--output=curves.svg"],
    "parity": ["parity", "--family=torch", f"--checkpoint={REMOTE}.pt"],
    "parity's page": ["parity", "--family=torch", f"--html={REMOTE}.html"],
}  # fmt: skip


@pytest.mark.slow_except(
    "train",
    "its configuration",
    "its text",
    "its parameters",
    "translate",
    "score",
    "inspect",
    "average",
    "evaluate",
    "convert",
    "convert a file",
)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_remote_path_is_refused_and_nothing_is_made(name, tmp_path, monkeypatch, capsys):
    arguments = [
        each.replace("configs/", f"{__file__.rpartition('/tests/')[0]}/configs/")
        for each in COMMANDS[name]
    ]
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert "gs:/" in line, line
    assert not [*tmp_path.rglob("gs:*")]
    assert not [*tmp_path.rglob("*bucket*")]


def test_a_local_folder_of_that_name_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("s3://bucket/file", tmp_path / "s3:" / "bucket" / "file"):
        with pytest.raises(UserError, match=r"^s3://bucket is a remote path"):
            atomic.write_text(atomic.Path(path), "text")
        with pytest.raises(UserError, match=r"s3://bucket/file is a remote path"):
            read_bytes(path)
    (tmp_path / "s3:").mkdir()
    atomic.write_text(atomic.Path("s3://bucket/file"), "text")
    assert read_bytes(tmp_path / "s3:" / "bucket" / "file") == b"text"
    for path in ("a:b/c", "C:", "run", "/tmp/x:y", ""):
        require_local(path) if path != "C:" else None
