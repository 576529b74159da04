"""Local copies: what is downloaded, what is published in which order, and kills in between."""

import hashlib
import itertools
import json
import shutil
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import copies
from flaxformer_mt.remote.copies import new_copy
from flaxformer_mt.remote.stores import Store


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def downloaded(url):
    with new_copy(url) as copy:
        copy.download()
        return contents(copy.local) if copy.local.is_dir() else {}


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name("partial")
    partial.write_text(text)
    partial.replace(path)  # As `atomic`: checkpoints are links to the cache.


FILES = st.sampled_from(["config.json", "metrics.jsonl", "tokenizer/joint.model", "cache/a/tokens"])
EDITS = st.lists(st.tuples(FILES, st.none() | st.text("ab", max_size=3)), max_size=8)


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(EDITS, min_size=1, max_size=3))
def test_another_machine_sees_what_was_published(tmp_path, sessions):
    url = f"file://{tmp_path}/remote"
    shutil.rmtree(tmp_path / "remote", ignore_errors=True)
    expected = {}
    for edits in sessions:
        with new_copy(url) as copy:
            copy.download()
            for name, text in edits:
                if text is None:
                    (copy.local / name).unlink(missing_ok=True)
                    expected.pop(name, None)
                else:
                    write(copy.local, name, text)
                    expected[name] = text.encode()
            copy.upload()
        assert downloaded(url) == expected


def test_a_version_is_downloaded_once(store_url, monkeypatch):
    with new_copy(store_url) as copy:
        write(copy.local, "checkpoints/2/manifest.json", "{}")
        write(copy.local, "checkpoints/2/params/d", "values")
        write(copy.local, "metrics.jsonl", "1\n")
        copy.upload()
    fetched, get = [], Store.get

    def counted(store, name, local):
        fetched.append(name)
        return get(store, name, local)

    monkeypatch.setattr(Store, "get", counted)
    first = downloaded(store_url)
    assert sorted(fetched) == sorted(first)
    fetched.clear()
    with new_copy(store_url) as copy:
        copy.download()
        assert contents(copy.local) == first
        with (copy.local / "metrics.jsonl").open("a") as file:
            file.write("2\n")
        copy.upload()
    assert fetched == []
    assert downloaded(store_url) == first | {"metrics.jsonl": b"1\n2\n"}
    assert fetched == ["metrics.jsonl"]


class Killed(BaseException):
    """Stands for the end of the process at a call of the store."""


def checkpoint(folder, step, values):
    """Writes a checkpoint as `step_folders.commit` does: the folder gets its name at the end."""
    partial = folder / "checkpoints" / ".flaxformer_mt-x.partial" / str(step)
    for name in ("a", "b"):
        write(partial, f"params/{name}", f"{values} {name}")
    hashes = {name: hashlib.sha256(text).hexdigest() for name, text in contents(partial).items()}
    write(partial, "manifest.json", json.dumps(hashes))
    shutil.rmtree(folder / "checkpoints" / str(step), ignore_errors=True)
    partial.rename(folder / "checkpoints" / str(step))


def train(copy, start, end):
    """Writes what a run writes, and publishes it after each checkpoint."""
    folder = copy.local
    if not (folder / "config.json").exists():
        write(folder, "data.json", "new")
        write(folder, "tokenizer/joint.model", "vocabulary")
        write(folder, "config.json", "configuration")
    for step in range(start, end):
        checkpoint(folder, step, f"values of {step}")
        write(folder, "data.json", "trained")
        write(folder, "metrics.jsonl", "\n".join(map(str, range(step + 1))))
        shutil.rmtree(folder / "checkpoints" / str(step - 2), ignore_errors=True)
        copy.upload()


def check(files):
    """Returns the newest step, -1 if there is none; fails if what is there is no whole run."""
    steps = {int(name.split("/")[1]) for name in files if name.startswith("checkpoints/")}
    for step in steps:
        prefix = f"checkpoints/{step}/"
        hashes = json.loads(files[f"{prefix}manifest.json"])
        for name, expected in hashes.items():
            assert hashlib.sha256(files[prefix + name]).hexdigest() == expected
    if "config.json" in files:
        assert {"data.json", "tokenizer/joint.model"} <= files.keys()
        assert files["data.json"] != b"trained" or steps
    newest = max(steps, default=-1)
    if newest >= 0 and "config.json" in files:
        assert files["metrics.jsonl"].decode().split("\n")[newest] == str(newest)
    return newest


def test_a_kill_at_each_call_of_the_store_leaves_a_whole_run(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/remote"
    with new_copy(url) as copy:
        train(copy, 0, 4)
    expected = downloaded(url)
    assert check(expected) == 3
    calls, number = 0, 0

    def killed(method):
        def call(*arguments):
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return method(*arguments)

        return call

    for name in ("put", "remove"):
        monkeypatch.setattr(Store, name, killed(getattr(Store, name)))
    while True:
        number, calls = number + 1, 0
        shutil.rmtree(tmp_path / "remote")
        try:
            with new_copy(url) as copy:
                train(copy, 0, 4)
        except Killed:
            calls = -1000
            with new_copy(url) as copy:
                copy.download()
                copy.forget_unfinished()
                newest = check(contents(copy.local) if copy.local.is_dir() else {})
                train(copy, newest + 1, 4)
                copy.upload()
            assert downloaded(url) == expected
            continue
        break
    assert number > 20


def test_files_that_come_and_go_while_they_are_published(tmp_path):
    url = f"file://{tmp_path}/remote"
    with new_copy(url) as copy:
        train(copy, 0, 1)
        is_over = threading.Event()

        def work():
            for step in itertools.count(1):
                checkpoint(copy.local, step, f"values of {step}")
                write(copy.local, "metrics.jsonl", "\n".join(map(str, range(step + 1))))
                shutil.rmtree(copy.local / "checkpoints" / str(step - 1))
                if is_over.is_set():
                    break

        worker = threading.Thread(target=work)
        worker.start()
        for _ in range(20):
            copy.upload()
            for name in contents(tmp_path / "remote"):
                assert ".flaxformer_mt" not in name
        is_over.set()
        worker.join()
        copy.upload()
        expected = contents(copy.local)
    assert check(downloaded(url)) > 1
    assert downloaded(url) == expected


def test_what_cannot_be_uploaded_is_kept(tmp_path, monkeypatch, s3_url):
    path = copies.local(s3_url)
    path.write_text("translations")
    bucket = s3_url.partition("//")[2].partition("/")[0]
    monkeypatch.setattr(
        copies._copies[s3_url], "store", Store(s3_url.replace(bucket, "no-such-bucket"))
    )
    with pytest.raises(UserError, match="; what could not be uploaded is in ") as caught:
        copies.publish()
    folder = str(caught.value).rpartition(" ")[2]
    assert contents(tmp_path / folder) == {"folder": b"translations"}


def test_a_folder_that_changes_while_it_is_read(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/remote"
    monkeypatch.setattr(copies, "_THREADS", 1)
    with new_copy(url) as copy:
        train(copy, 0, 2)
        removed = iter(["checkpoints/0", "checkpoints/1"])
        get = Store.get

        def training_meanwhile(store, name, local):
            step = next(removed, None)
            if step:
                shutil.rmtree(tmp_path / "remote" / step)
                checkpoint(tmp_path / "remote", 5, "values")
                write(tmp_path / "remote", "metrics.jsonl", "0\n1\n2\n3\n4\n5")
            return get(store, name, local)

        monkeypatch.setattr(Store, "get", training_meanwhile)
        assert check(downloaded(url)) == 5
