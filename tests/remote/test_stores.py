"""The names of remote paths, and the files of a store."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.stores import Store, url_of

NAMES = st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda name: name.strip("."))


@given(st.sampled_from(["s3", "gs", "gcs", "abfs", "hdfs", "memory"]), st.lists(NAMES, min_size=1))
def test_a_url_is_found_as_a_string_and_as_a_path(scheme, parts):
    url = f"{scheme}://{'/'.join(parts)}"
    assert url_of(url) == url_of(Path(url)) == url


@given(st.lists(NAMES, min_size=1))
def test_other_paths_are_local(parts):
    path = "/".join(parts)
    assert url_of(path) is url_of(f"/{path}") is url_of(f"./{path}") is url_of("a:b/c") is None


def test_the_path_of_a_file_system_is_absolute():
    assert url_of(Path("file:///tmp/x")) == "file:///tmp/x"


def test_files_are_written_read_listed_and_removed(store_url, tmp_path):
    store = Store(store_url)
    assert store.list() == {}
    assert store.read("a") is None
    local = tmp_path / "file"
    local.write_bytes(b"content")
    assert store.put("b/c", local)
    assert store.write("a", b"small", is_new=True)
    assert not store.write("a", b"other", is_new=True)
    assert store.read("a") == b"small"
    files = store.list()
    assert {name: size for name, (_, size) in files.items()} == {"a": 5, "b/c": 7}
    store.write("a", b"large")
    assert store.list()["a"] != files["a"]
    assert store.list()["b/c"] == files["b/c"]
    assert store.get("b/c", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == b"content"
    assert not store.get("none", tmp_path / "none")
    assert not store.put("none", tmp_path / "missing")
    store.remove("b/c")
    store.remove("b/c")
    assert store.list().keys() == {"a"}
    assert Store(f"{store_url}/a").list().keys() == {""}


def test_what_cannot_be_used_is_one_line(s3_url, monkeypatch, tmp_path):
    with pytest.raises(
        UserError, match=r"^nothing://x cannot be used: Protocol not known: nothing"
    ):
        Store("nothing://x")
    with pytest.raises(UserError, match=r"gs:// needs .*: pip install 'flaxformer_mt\[gcs\]'"):
        Store("gs://bucket")
    with pytest.raises(UserError, match=r"^s3://no-such-bucket/x cannot be used: "):
        Store("s3://no-such-bucket/x").write("a", b"")
    Store(s3_url).write("../a", b"")
    with pytest.raises(UserError, match=r"has a file '.*\.\./a', which is no name of a file here"):
        Store(s3_url.rpartition("/")[0]).list()
