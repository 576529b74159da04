"""A URL is refused in one line, where a local path is needed or the store cannot be used.

`tests/remote` has the stores that can be.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.urls import url_of

REMOTE = "gs://bucket/some/thing"
COMMANDS = {
    "train": ["train", "--config=configs/quickstart.py", f"--workdir={REMOTE}"],
    "its configuration": ["train", f"--config={REMOTE}.py", "--workdir=run"],
    "its text": ["train", "--config=configs/quickstart.py", "--workdir=run",
                 "--data.corpus=text", f"--data.path={REMOTE}"],
    "its parameters": ["train", "--config=configs/quickstart.py", "--workdir=run",
                       f"--train.init-from={REMOTE}"],
    "translate": ["translate", f"--run={REMOTE}"],
    "score": ["score", f"--run={REMOTE}", "--source=a", "--target=b"],
    "inspect": ["inspect", f"--run={REMOTE}"],
    "average": ["average", f"--run={REMOTE}", "--last=2"],
    "evaluate": ["evaluate", f"--hypothesis={REMOTE}", f"--reference={REMOTE}"],
    "convert": ["convert", "--from=marian", REMOTE, "run"],
    "convert a file": ["convert", "--from=torch", f"{REMOTE}.pt", "out.safetensors"],
    "doctor": ["doctor", f"--workdir={REMOTE}"],
}  # fmt: skip

OUTPUTS = {"train", "doctor"}


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
    printed = capsys.readouterr()
    *_, line = printed.err.strip().splitlines()
    assert "gs://" in line
    assert ("commands read from URLs" if name in OUTPUTS else "flaxformer_mt[gcs]") in line
    assert not [*tmp_path.rglob("gs:*")]
    assert not [*tmp_path.rglob("*bucket*")]


NAMES = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda name: name.strip("."))


@given(st.sampled_from(["s3", "gs", "gcs", "abfs", "hdfs", "memory"]), st.lists(NAMES, min_size=1))
def test_a_url_is_found_as_a_string_and_as_a_path(scheme, parts):
    url = f"{scheme}://{'/'.join(parts)}"
    assert url_of(url) == url_of(Path(url)) == url


@given(st.lists(NAMES, min_size=1))
def test_other_paths_are_local(parts):
    path = "/".join(parts)
    assert url_of(path) is url_of(f"/{path}") is url_of(f"./{path}") is url_of("a:b/c") is None


def test_what_a_script_writes_is_local():
    for write in (
        lambda: fmt.train("configs/quickstart.py", REMOTE),
        lambda: fmt.Checkpoints(REMOTE),
    ):
        with pytest.raises(
            UserError, match=r"^gs://bucket/some/thing.* cannot be written to: give a local path"
        ):
            write()
