"""Files and folders appear complete and durable, or not at all."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from full_disks import files_no_longer_than

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError


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
    assert calls == [
        ("fsync", atomic.MARKER), ("fsync", "file"), ("rename", "file"), ("fsync", tmp_path.name),
    ]  # fmt: skip


def test_a_folder_is_flushed_with_all_its_files_before_the_renaming(tmp_path, calls):
    with atomic.new_folder(tmp_path / "folder") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("text")
    renaming = calls.index(("rename", "folder"))
    assert set(calls[:renaming]) == {
        ("fsync", atomic.MARKER), ("fsync", "file"), ("fsync", "inner"), ("fsync", "folder"),
    }  # fmt: skip
    assert calls[renaming + 1 :] == [("fsync", tmp_path.name)]


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with contextlib.suppress(ZeroDivisionError), atomic.new_file(path) as partial:
        partial.write_text("half")
        partial.write_text(f"{1 / 0}")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_folder_is_kept_unless_it_is_to_be_replaced(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(UserError, match="exists"), atomic.new_folder(folder):
        pytest.fail("not reached")
    with atomic.new_folder(folder, replace=True) as partial:
        (partial / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["new"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from flaxformer_mt import atomic

    with atomic.new_folder(Path(sys.argv[1])) as partial:
        (partial / "inner").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path / "killed"]
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert leftover.name != "killed"
    atomic.write_text(tmp_path / "next", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


def test_what_a_living_process_is_writing_is_not_removed(tmp_path):
    with (
        atomic.new_file(tmp_path / "output") as first,
        atomic.new_file(tmp_path / "output") as last,
    ):
        first.write_text("first")
        last.write_text("last")
        atomic.write_text(tmp_path / "output", "other")
        atomic.remove_leftovers(tmp_path)
    assert (tmp_path / "output").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def imitation(tmp_path, content):
    """A foreign folder with the name of a workspace, and a marker with other content."""
    with atomic.workspace(tmp_path) as workspace:
        folder = workspace.with_name(workspace.name.replace("-", "-0"))
    folder.mkdir()
    (folder / "kept").write_text("foreign")
    if content is not None:
        (folder / atomic.MARKER).write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [None, b"", b"Another program's.\n"])
def test_folders_without_the_mark_are_not_removed(tmp_path, content):
    folder = imitation(tmp_path, content)
    with atomic.new_folder(tmp_path / "output"):
        pass
    atomic.write_text(tmp_path / "file", "text")
    assert (folder / "kept").read_text() == "foreign"


@pytest.mark.parametrize("content", [None, b""])
def test_what_a_process_left_that_was_killed_before_it_wrote_the_mark_is_removed(tmp_path, content):
    folder = imitation(tmp_path, content)
    (folder / "kept").unlink()
    atomic.write_text(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_temporary_folders_of_killed_processes_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = """
import sys, tempfile
from flaxformer_mt import atomic
tempfile.tempdir = sys.argv[1]
with atomic.temporary_folder() as folder:
    (folder / "tokens").write_text("many")
    print(folder, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        folder = Path(process.stdout.readline().rstrip())
        with atomic.temporary_folder() as own:
            assert {*tmp_path.iterdir()} == {folder, own}
        process.kill()
    assert (folder / "tokens").exists()
    with atomic.temporary_folder() as own:
        assert [*tmp_path.iterdir()] == [own]
    assert not [*tmp_path.iterdir()]


def test_a_leftover_behind_a_link_is_not_removed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = imitation(tmp_path / "elsewhere", atomic._MARK)
    (tmp_path / folder.name).symlink_to(folder)
    atomic.write_text(tmp_path / "file", "text")
    assert (folder / "kept").read_text() == "foreign"


def test_nothing_is_written_through_a_link(tmp_path):
    target = tmp_path / "target"
    target.write_text("foreign")
    (tmp_path / "output").symlink_to(target)
    atomic.write_text(tmp_path / "output", "text")
    assert target.read_text() == "foreign"
    assert (tmp_path / "output").read_text() == "text"


@pytest.mark.parametrize("kind", ["a symbolic link", "not a regular file"])
def test_nothing_is_appended_to_a_link_or_a_pipe(tmp_path, kind):
    target, path = tmp_path / "target", tmp_path / "lines"
    target.write_text("foreign")
    path.symlink_to(target) if kind == "a symbolic link" else os.mkfifo(path)
    with pytest.raises(UserError, match=f"lines cannot be written: it is {kind}"):
        atomic.append_text(path, "text")
    assert target.read_text() == "foreign"


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "lines"
    atomic.append_text(path, "one\n")
    with files_no_longer_than(10), pytest.raises(UserError, match="File too large"):
        atomic.append_text(path, "two, which is too long\n")
    assert path.read_text() == "one\n"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_devices_are_written_to_directly(name):
    device = Path(name)
    before = os.stat(device)
    if name == "/dev/full":
        with pytest.raises(UserError, match="/dev/full cannot be written: No space left"):
            atomic.write_text(device, "text")
    else:
        atomic.write_text(device, "text")
    assert os.stat(device) == before


def test_a_redirected_standard_output_is_written_to_directly(tmp_path):
    program = (
        "from pathlib import Path; from flaxformer_mt import atomic;"
        "atomic.write_text(Path('/dev/fd/1'), 'text')"
    )
    with (tmp_path / "output").open("w") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, check=True)
    assert (tmp_path / "output").read_text() == "text"
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize("create", [atomic.new_file, atomic.new_folder])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file/deeper/name", "{path.parent} is not a folder"),
        ("link/name", "{path.parent} is not a folder"),
        ("folder", "{path} (exists|cannot be written: it is a folder)"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, create, place, reason):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("missing")
    path = tmp_path / place
    with pytest.raises(UserError, match=reason.format(path=path)), create(path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", "link"}


@pytest.mark.parametrize("create", [atomic.new_file, atomic.new_folder])
def test_parents_are_created_and_removed_again_after_a_failure(tmp_path, create):
    path = tmp_path / "missing" / "too" / "name"
    with contextlib.suppress(ZeroDivisionError), create(path):
        print(1 / 0)
    assert not list(tmp_path.iterdir())
    with create(path) as partial:
        if create == atomic.new_file:
            partial.touch()
    assert path.exists()


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_a_folder_that_can_be_written_to_is_not_touched(tmp_path, monkeypatch, has_unnamed_files):
    if not has_unnamed_files:
        monkeypatch.setattr(os, "open", refusing_unnamed_files(os.open))
    before = tmp_path.stat()
    atomic.require_writable(tmp_path)
    atomic.require_writable(tmp_path / "missing" / "too")
    assert tmp_path.stat() == before


def refusing_unnamed_files(open_file):
    def refusing(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return open_file(path, flags, mode)

    return refusing


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/dev/null", "/dev/null is not a folder"),
        ("/dev/null/run", "/dev/null is not a folder"),
        ("/proc/run", "Permission denied"),
        ("a" * 300, "File name too long"),
        ("link", "link is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_written_to(tmp_path, name, reason):
    (tmp_path / "link").symlink_to("missing")
    with pytest.raises(UserError, match=f"{name} cannot be written: .*{reason}"):
        atomic.require_writable(tmp_path / name)


def test_what_comes_into_a_folder_while_its_successor_is_written_is_kept(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()

    def require_empty(path):
        if [*path.iterdir()]:
            raise UserError(f"{path} is not empty")

    def replaced_amid_another_write():
        with atomic.new_folder(folder, replace=require_empty) as partial:
            (partial / "new").touch()
            (folder / "theirs").touch()

    with pytest.raises(UserError, match="is not empty"):
        replaced_amid_another_write()
    assert [*tmp_path.rglob("*")] == [folder, folder / "theirs"]
    (folder / "theirs").unlink()
    with atomic.new_folder(folder, replace=require_empty) as partial:
        (partial / "new").touch()
    assert [*tmp_path.rglob("*")] == [folder, folder / "new"]
