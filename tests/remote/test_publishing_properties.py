"""Publishers, readers and foreign writers on a store whose requests fail in every way.

A schedule is a function of its number. Each request may be carried out, lost, carried out without
an answer, carried out much later, or carried out twice. Its process may be killed before or after
it. Processes take turns at every request.
"""

import hashlib
import itertools
import json
import random
import re
import shutil
import threading
import types

import pytest

from flaxformer_mt import atomic
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import publishing, reading
from flaxformer_mt.remote.index import newest
from flaxformer_mt.remote.publishing import Publisher
from flaxformer_mt.remote.stores import Content, Object, StoreError

INDEX = re.compile(r"flaxformer_mt-index-\d+\.json")


class Killed(BaseException):
    """Ends a process at a request."""


class Model:
    """A store, and the order in which processes come to it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.objects, self.foreign = {}, {}
        self.late = []
        self.delay = self.random.choice([0.0, 0.02, 0.1])
        self.run, self.keys, self.folders = None, set(), []
        self.faults = self.random.choice([0.0, 0.05, 0.3])

    def mutate(self, name, content):
        """Writes an object, or removes it if the content is None."""
        assert name not in self.foreign, f"{name} is foreign"
        assert content is not None or name not in self.keys, f"{name} is published"
        if content is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = content
            if name == max(filter(INDEX.fullmatch, self.objects), default=""):
                self.check_index(json.loads(content))

    def check_index(self, values):
        """What is published is whole, and never another run than before."""
        files = {name: self.objects[key] for name, (key, *_) in values["files"].items()}
        check_view(files, self.folders)
        self.keys = {key for key, *_ in values["files"].values()}
        if files:
            assert self.run in (None, values["run"])
            self.run = values["run"]

    def carry_out_late(self):
        if self.late:
            self.late.pop(self.random.randrange(len(self.late)))()

    def write_foreign(self):
        """Puts an object beside the others, as near to them as it gets."""
        near = self.random.choice([*sorted(self.objects), "README", "checkpoints/1/manifest.json"])
        name = f"{near}.{len(self.foreign)}" if near in self.objects else near
        self.objects[name] = self.foreign[name] = f"foreign {len(self.foreign)}".encode()


class Requests:
    """The interface of `Store` for one process."""

    url = "s3://bucket/run"
    is_publishable = True

    def __init__(self, model, turn):
        self.model, self.turn = model, turn

    def _request(self, apply, changes=False):
        self.turn()
        chance = self.model.random.random
        if chance() >= self.model.faults:
            return apply()
        kinds = ["lost", "killed before", "killed after"]
        kind = self.model.random.choice(kinds + ["unanswered", "late", "twice"] * changes)
        if kind == "twice":
            apply()
            return apply()
        if kind == "late":
            self.model.late.append(apply)
        if kind in ("unanswered", "killed after"):
            apply()
        if kind.startswith("killed"):
            raise Killed
        raise StoreError(f"{kind} request")

    def find(self):
        return self._request(
            lambda: {name: Object(name, len(each)) for name, each in self.model.objects.items()}
        )

    def names(self):
        return self._request(lambda: {name.partition("/")[0] for name in self.model.objects})

    def read(self, name):
        return self._request(lambda: self.model.objects.get(name))

    def get(self, name, local, *, size):
        content = self.read(name)
        if content is not None:
            local.write_bytes(content)
        return content is not None

    def create(self, name, content):
        def apply():
            if name in self.model.objects:
                return False
            self.model.mutate(name, content)
            return True

        return self._request(apply, changes=True)

    def put(self, name, file, *, size):
        content = file.read(size)
        self._request(lambda: self.model.mutate(name, content), changes=True)
        return Content(len(content), hashlib.sha256(content).hexdigest())

    def remove(self, name):
        self._request(lambda: self.model.mutate(name, None), changes=True)

    def is_encrypted(self, name):
        return False


class Turns:
    """Lets one of several processes run at a time: each waits at its next request."""

    def __init__(self, generator, names):
        self.random, self.names = generator, names
        self.events = {name: threading.Event() for name in names}

    def start(self):
        self.events[self.random.choice(self.names)].set()

    def wait(self, name):
        self.events[name].wait()
        self.events[name].clear()

    def pass_on(self, name):
        """Gives the turn to a random process, and waits until it is back."""
        chosen = self.random.choice(self.names)
        if chosen != name:
            self.events[chosen].set()
            self.wait(name)

    def end(self, name):
        self.names.remove(name)
        if self.names:
            self.start()


class Folder:
    """A run folder, and all that it ever held."""

    def __init__(self, path):
        self.path = path
        self.step = 0
        self.history = []
        self.fill({"config.json": b"{}"})

    def fill(self, files):
        for name, content in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)
        self.step = max(self.steps(), default=0)
        self.record()

    def write(self, generator):
        """Does what training does: saves, removes, logs."""
        kind = generator.choice(["save", "save", "remove", "log", "change", "change", "again"])
        if kind == "save":
            self.save(self.step + 1, generator)
        elif kind == "again" and self.step:
            self.save(self.step, generator)
        elif kind == "remove" and len(self.steps()) > 1:
            shutil.rmtree(self.path / "checkpoints" / str(self.steps()[0]))
        elif kind == "log":
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(f"{generator.random()}\n")
        else:
            (self.path / "config.json").write_text(json.dumps(generator.choice([{}, {"a": 1}])))
        self.record()

    def save(self, step, generator):
        folder = self.path / "checkpoints" / str(step)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "params").mkdir(parents=True)
        files = {name: generator.randbytes(9) for name in ("params/a", "params/b")}
        for name, content in files.items():
            (folder / name).write_bytes(content)
        entries = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        }
        (folder / "manifest.json").write_text(json.dumps({"files": entries}))
        self.step = max(step, self.step)

    def steps(self):
        return sorted(int(path.name) for path in self.path.glob("checkpoints/*"))

    def contents(self):
        return {
            path.relative_to(self.path).as_posix(): path.read_bytes()
            for path in self.path.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }

    def record(self):
        self.history.append(checkpoints(self.contents()))


def checkpoints(files):
    return {name: content for name, content in files.items() if name.startswith("checkpoints/")}


def view_of(store):
    """Reads a published run as `reading.fetch` does; None if it changes all the time."""
    for _ in range(3):
        index = newest(store)
        found = {name: store.read(key) for name, (key, _) in index.files.items()}
        if None not in found.values():
            for name, content in found.items():
                assert Content(len(content), hashlib.sha256(content).hexdigest()) == (
                    index.files[name].content
                )
            return found
    return None


def check_view(files, folders):
    """What is published is a configuration with whole checkpoints, as one folder held them."""
    steps = {name.split("/")[1] for name in checkpoints(files)}
    assert not files or ("config.json" in files and steps)
    for step in steps:
        assert len([name for name in files if name.startswith(f"checkpoints/{step}/")]) == 3
    histories = (held for folder in folders for held in folder.history)
    assert not files or any(checkpoints(files).items() <= held.items() for held in histories)


class Schedule:
    """Two or three processes with a folder each, and a reader, on one URL."""

    def __init__(self, seed, path):
        self.model = Model(seed)
        self.random = self.model.random
        self.names = range(self.random.choice([2, 2, 3]))
        self.turns = Turns(self.random, [*self.names, "reader"])
        self.folders = [Folder(path / str(number)) for number in self.names]
        self.model.folders = self.folders
        self.errors = []

    def run(self):
        if self.random.random() < 0.1:
            self.model.write_foreign()
        was_empty = not self.model.objects
        actors = dict.fromkeys(self.names, self.publish) | {"reader": self.read}
        threads = [threading.Thread(target=self.act, args=each) for each in actors.items()]
        for thread in threads:
            thread.start()
        self.turns.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        assert self.finish() <= was_empty

    def act(self, name, actor):
        self.turns.wait(name)
        try:
            actor(name)
        except BaseException as error:
            self.errors.append(error)
        self.turns.end(name)

    def requests(self, name):
        def turn():
            self.turns.pass_on(name)
            if self.random.random() < self.model.delay:
                self.model.carry_out_late()
            if self.random.random() < 0.02:
                self.model.write_foreign()
            if name != "reader" and self.random.random() < 0.05:
                self.folders[name].write(self.random)  # Training does not wait.

        return Requests(self.model, turn)

    def publish(self, name):
        folder, store = self.folders[name], self.requests(name)
        publisher = Publisher(folder.path, store)
        if name and self.random.random() < 0.7:
            self.continue_run(folder, store)
        for _ in range(self.random.randrange(6)):
            folder.write(self.random)
            try:
                publisher.sync()
            except StoreError:
                pass
            except Killed:
                publisher = Publisher(folder.path, store)
            except UserError:  # It lost, or was refused.
                if self.random.random() < 0.5:
                    return
                publisher = Publisher(folder.path, store)

    def continue_run(self, folder, store):
        """Does what `continue_from` does."""
        for _ in range(self.random.randrange(20)):
            self.turns.pass_on(self.folders.index(folder))
        try:
            found = view_of(store)
        except (UserError, Killed):
            return
        if found:
            folder.fill(found)

    def read(self, name):
        for _ in range(self.random.randrange(6)):
            try:
                check_view(view_of(self.requests(name)) or {}, self.folders)
            except (StoreError, Killed):
                continue

    def finish(self):
        """Without faults, one publisher makes the store equal to its folder."""
        self.model.faults = 0.0
        while self.model.late:
            self.model.carry_out_late()
        store = Requests(self.model, lambda: None)
        published = False
        for folder in self.folders:
            try:
                published = Publisher(folder.path, store).sync()
            except UserError:
                continue
            if published:
                break
        own = self.model.objects.keys() - self.model.foreign.keys()
        for name, content in self.model.foreign.items():
            assert self.model.objects[name] == content
        index = newest(store)
        if published:
            assert view_of(store) == folder.contents()
            assert own == index.keys | {index.name}
        else:  # There was nothing to publish, or the URL was not empty.
            assert not index.files
            assert own <= {index.name}
            assert self.model.foreign or not any(map(Folder.steps, self.folders))
        return published


@pytest.fixture
def one_thread(monkeypatch):
    """Makes schedules functions of their numbers, and does without waiting for a disk."""
    monkeypatch.setattr(reading, "THREADS", 1)
    monkeypatch.setattr(atomic, "write_text", lambda path, text: path.write_text(text))
    numbers = itertools.count()
    monkeypatch.setattr(
        publishing.uuid, "uuid4", lambda: types.SimpleNamespace(hex=f"{next(numbers):032x}")
    )


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_schedules(count, one_thread, tmp_path):
    for seed in range(count):
        path = tmp_path / str(seed)
        path.mkdir()
        Schedule(seed, path).run()
        shutil.rmtree(path)
