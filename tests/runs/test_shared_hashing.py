"""Each of several processes hashes the files of a checkpoint that it has written."""

import json
import threading
import time

import jax
import pytest

from flaxformer_mt.run_layout import MANIFEST
from flaxformer_mt.runs import manifest, step_folders

FILES = {
    "params/d/merged": b"index",
    "params/ocdbt.process_0/d/a": b"of the first",
    "params/ocdbt.process_1/d/b": b"of the second",
    "params/ocdbt.process_11/d/c": b"of the twelfth",
    "training/ocdbt.process_1/manifest.ocdbt": b"also of the second",
}


@pytest.fixture
def partial(tmp_path):
    folder = tmp_path / "workspace" / "7"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def as_process(monkeypatch, number, read):
    synced = manifest._synced
    monkeypatch.setattr(jax, "process_index", lambda: number)
    monkeypatch.setattr(manifest, "_synced", lambda path: (read.append(path), synced(path))[1])


def test_the_first_process_reads_none_of_the_others_files(partial, tmp_path, monkeypatch):
    committed = threading.Thread(
        target=step_folders.commit, args=(tmp_path, partial, {"progress": {}}, 2)
    )
    read = []
    with monkeypatch.context() as patch:
        as_process(patch, 1, read)
        step_folders.leave_hashes(partial)
    assert {path.relative_to(partial).as_posix() for path in read} == {
        name for name in FILES if "process_1/" in name
    }
    read.clear()
    as_process(monkeypatch, 0, read)
    committed.start()
    committed.join()
    names = {path.name for path in read}
    assert {"merged", "a", "c"} <= names
    assert not {"b", "manifest.ocdbt"} & names
    listed = json.loads((tmp_path / "7" / MANIFEST).read_text())["files"]
    assert listed.keys() == {*FILES, "progress.json"}
    assert list(listed) == sorted(listed)
    assert manifest.damage(tmp_path / "7") is None


def test_the_first_process_waits_for_the_others(partial, tmp_path, monkeypatch):
    committed = threading.Thread(
        target=step_folders.commit, args=(tmp_path, partial, {"progress": {}}, 2)
    )
    is_waiting = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: is_waiting.set())
    committed.start()
    is_waiting.wait()
    assert not (tmp_path / "7").exists()
    with monkeypatch.context() as patch:
        as_process(patch, 1, [])
        step_folders.leave_hashes(partial)
    committed.join()
    assert (tmp_path / "7" / MANIFEST).exists()
