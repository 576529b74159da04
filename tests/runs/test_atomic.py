"""Files and folders appear complete and durable, or not at all."""

import contextlib
import os
from pathlib import Path

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic


@pytest.fixture
def calls(monkeypatch):
    """The system calls that matter for durability, in order, each with the file's name."""
    recorded = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        recorded.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recorded_replace(source, target, **options):
        recorded.append(("rename", Path(target).name))
        replace(source, target, **options)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return recorded


def test_a_file_is_flushed_before_and_its_folder_after_the_renaming(tmp_path, calls):
    atomic.write_text(tmp_path / "file", "grün\n")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "grün\n"
    assert calls == [("fsync", "file.partial"), ("rename", "file"), ("fsync", tmp_path.name)]


def test_a_folder_is_flushed_with_all_its_files_before_the_renaming(tmp_path, calls):
    with atomic.new_folder(tmp_path / "folder") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("text")
    renaming = calls.index(("rename", "folder"))
    assert set(calls[:renaming]) == {
        ("fsync", "file"), ("fsync", "inner"), ("fsync", "folder.partial"),
    }  # fmt: skip
    assert calls[renaming + 1 :] == [("fsync", tmp_path.name)]


def test_appended_text_is_flushed(tmp_path, calls):
    atomic.append_text(tmp_path / "lines", "one\n")
    atomic.append_text(tmp_path / "lines", "two\n")
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"
    assert calls == [("fsync", "lines")] * 2


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with contextlib.suppress(ZeroDivisionError), atomic.new_file(path) as partial:
        partial.write_text("half")
        partial.write_text(f"{1 / 0}")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_no_folder(tmp_path):
    with (
        pytest.raises(UserError, match=r"folder cannot be written: No such file or directory"),
        atomic.new_folder(tmp_path / "folder") as partial,
    ):
        (partial / "missing" / "file").write_text("half")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept_unless_it_is_to_be_replaced(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(UserError, match="exists"), atomic.new_folder(folder):
        pytest.fail("not reached")
    with atomic.new_folder(folder, replace=True) as partial:
        (partial / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    atomic.partial_path(tmp_path / "folder").mkdir()
    (atomic.partial_path(tmp_path / "folder") / "leftover").touch()
    with atomic.new_folder(tmp_path / "folder"):
        pass
    assert not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("create", [atomic.new_file, atomic.new_folder])
def test_a_missing_parent_is_named(tmp_path, create):
    path = tmp_path / "missing" / "name"
    with pytest.raises(UserError, match=r"missing is not a folder"), create(path):
        pytest.fail("not reached")


def test_parents_are_created_on_request(tmp_path):
    with atomic.new_folder(tmp_path / "missing" / "folder", parents=True):
        pass
    assert (tmp_path / "missing" / "folder").is_dir()
