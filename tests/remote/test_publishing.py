"""Publishing to S3 and to a file system, as the commands do it."""

import json
import shutil
import threading
import time

import pytest

import flaxformer_mt as fmt
from flaxformer_mt.cli import main
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import index, publishing
from flaxformer_mt.remote.publishing import Publisher, publish
from flaxformer_mt.remote.stores import Store, StoreError
from tests.remote.conftest import contents, objects, upload


def save(run, step, text="values"):
    """Writes a checkpoint of one file."""
    import hashlib

    folder = run / "checkpoints" / str(step)
    (folder / "params").mkdir(parents=True)
    content = f"{text} of {step}".encode()
    (folder / "params" / "a").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"params/a": entry}}))


@pytest.fixture
def run(tmp_path):
    """Returns a run folder with a checkpoint, for the publisher alone."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save(folder, 1)
    return folder


def published(url):
    """Returns the files of a published run, by the names in its folder."""
    found, files = objects(url), index.newest(Store(url)).files
    return {name: found[entry.key] for name, entry in files.items()}


@pytest.mark.parametrize("place", ["", "/photos"])
def test_a_folder_of_others_is_refused_and_stays(run, store_url, place, caplog):
    foreign = {"photos/a.jpg": b"a", "notes.txt": b"n"}
    url = store_url.rpartition("/")[0]
    upload(url, foreign)
    for attempt in (
        lambda: publish(run, url + place),
        lambda: publishing.publishing(run, url + place).__enter__(),
    ):
        with pytest.raises(UserError, match="has objects that are not of a published run"):
            attempt()
    assert objects(url) == foreign
    publish(run, f"{url}/photos/run")
    assert {name: objects(url)[name] for name in foreign} == foreign


def test_what_is_new_is_added_and_only_what_was_published_is_removed(run, store_url):
    publisher = Publisher(run, Store(store_url))
    assert publisher.sync()
    foreign = {"README": b"mine", "checkpoints/1/notes": b"mine"}
    upload(store_url, foreign)
    save(run, 2)
    (run / "checkpoints" / "1").rename(run / "elsewhere")
    (run / "checkpoints" / "3").mkdir()  # It is being written.
    (run / "checkpoints" / "3" / "params").write_text("half")
    publisher.sync()
    (run / "checkpoints" / "3" / "params").unlink()
    (run / "checkpoints" / "3").rmdir()
    shutil.rmtree(run / "elsewhere")
    assert published(store_url) == contents(run)
    newest = index.newest(Store(store_url))
    assert objects(store_url).keys() == {newest.name, *newest.keys, *foreign}
    before = objects(store_url)
    publish(run, store_url)  # By another process: nothing is uploaded again.
    now = index.newest(Store(store_url))
    assert objects(store_url).keys() ^ before.keys() == {newest.name, now.name}


def test_of_two_publishers_the_first_stops(run, store_url, tmp_path, monkeypatch):
    first = Publisher(run, Store(store_url))
    first.sync()
    other = tmp_path / "other"
    shutil.copytree(run, other)
    save(other, 2, "others")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    assert Publisher(other, Store(store_url)).sync()
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    save(run, 2)
    with pytest.raises(StoreError):
        first.sync()
    with pytest.raises(UserError, match="another process publishes to"):
        first.sync()
    assert published(store_url) == contents(other)
    shutil.rmtree(run / "checkpoints" / "2")
    with pytest.raises(UserError, match="step 2 of this run, which is newer"):
        publish(run, store_url)
    (run / publishing.run_layout.PUBLICATION).unlink()
    with pytest.raises(UserError, match="has another run"):
        publish(run, store_url)
    assert published(store_url) == contents(other)


def test_training_goes_on_when_another_publishes(run, store_url, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(publishing, "_SECONDS", 1e6)  # It publishes at the end only.
    publish(run, store_url)
    with publishing.publishing(run, store_url):
        other = tmp_path / "other"
        shutil.copytree(run, other)
        publish(other, store_url)
        save(run, 2)
    assert [each.message for each in caplog.records if "another process publishes" in each.message]
    assert (run / "checkpoints" / "2").is_dir()
    assert published(store_url) == contents(other)


def test_an_outage_costs_nothing_but_publication(run, store_url, monkeypatch, caplog):
    put, is_out = Store.put, threading.Event()

    def fail(store, name, file, *, size):
        if is_out.is_set():
            raise StoreError(f"{store.url} cannot be used: no network")
        return put(store, name, file, size=size)

    monkeypatch.setattr(Store, "put", fail)
    publish(run, store_url)
    before = contents(run)
    with publishing.publishing(run, store_url):
        is_out.set()
        save(run, 2)
    assert f"flaxformer-mt publish {run} {store_url}" in caplog.records[-1].message
    assert published(store_url) == before
    is_out.clear()
    assert main(["publish", str(run), store_url]) == 0
    assert published(store_url) == contents(run)


def test_a_request_that_is_not_answered_ends(run, s3_url, monkeypatch):
    from flaxformer_mt.remote import stores

    never = threading.Event()
    store = Store(s3_url)
    monkeypatch.setattr(stores, "_SECONDS", 0.01)
    monkeypatch.setattr(store._files, "cat_file", lambda path: never.wait())
    with pytest.raises(StoreError, match="cannot be used: it does not answer"):
        store.read("a")
    never.set()


def test_a_damaged_index_removes_and_writes_nothing(run, s3_url, tmp_path):
    publish(run, s3_url)
    name = index.newest(Store(s3_url)).name
    values = json.loads(objects(s3_url)[name])
    upload(s3_url, {"mine": b"mine"})
    for damage in (
        {"others": ["mine"]},
        {"files": {"../../a": values["files"]["config.json"]}},
        {"files": {"config.json": ["mine", 4, "0"]}},
        {"files": {"config.json": [1, float("nan"), []]}},
        {"others": 3},
    ):
        upload(s3_url, {name: json.dumps(values | damage).encode()})
        for attempt in (publish, lambda folder, url: fmt.Run(url)):
            with pytest.raises(UserError, match=f"{name} is damaged"):
                attempt(run, s3_url)
    assert objects(s3_url)["mine"] == b"mine"


def test_a_run_is_continued_elsewhere(trained_run, s3_url, tmp_path, capfd):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(trained_run, first)
    publish(first, s3_url)
    # Without a test, which would translate all of its sentences.
    changes = {"train": {"num_steps": 202, "log_every": 1}, "data": {"test_split": ""}}
    config = with_changes(fmt.Run(s3_url).config, changes)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    with pytest.raises(UserError, match="other holds other files than a run"):
        fmt.train(config, tmp_path / "other", publish=s3_url)
    trained = fmt.train(config, second, accept_changes=True, publish=s3_url)
    assert trained.latest_step == 202
    assert fmt.Run(s3_url).latest_step == 202
    found = published(s3_url)
    assert all(contents(second)[name] == content for name, content in found.items())
    assert main(["publish", str(first), s3_url]) == 1
    assert "step 202 of this run, which is newer" in capfd.readouterr().err
    assert published(s3_url) == found
