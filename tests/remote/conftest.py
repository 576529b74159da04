import logging
import shutil
import socket
import uuid

import fsspec
import pytest

from flaxformer_mt.remote import reading
from flaxformer_mt.remote.publishing import publish


@pytest.fixture(scope="session")
def s3_server():
    """Returns the URL of a server with the interface of S3 that runs in this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = pytest.importorskip("moto.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = server.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    running.start()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Gives each test a cache folder of its own, as on a machine that has seen nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield
    forget_copies()


def forget_copies():
    """Does what the end of a process does."""
    reading._open.close()
    reading._views.clear()


def contents(folder):
    """Returns the files of a local folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def objects(url):
    """Returns the objects of a folder of a store."""
    files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    names = files.find(root) if files.exists(root) else []
    return {name[len(root) + 1 :]: files.cat_file(name) for name in names}


def upload(url, files):
    """Writes objects as another program does."""
    store, root = fsspec.core.url_to_fs(url)
    for name, content in files.items():
        store.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        store.pipe_file(f"{root}/{name}", content)


@pytest.fixture(params=["s3", "file"])
def store_url(request, tmp_path, monkeypatch):
    """Returns the URL of an empty folder of a store: of S3, and of a file system."""
    if request.param == "file":
        return f"file://{tmp_path}/remote/folder"
    return request.getfixturevalue("s3_url")


@pytest.fixture
def s3_url(s3_server, monkeypatch):
    """Returns the URL of an empty folder of S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/folder"


@pytest.fixture
def published_run(trained_run, s3_url, tmp_path):
    """Returns the URL of a trained run, and a local folder of the same."""
    folder = tmp_path / "local" / "folder"
    shutil.copytree(trained_run, folder)
    publish(folder, s3_url)
    return s3_url, folder
