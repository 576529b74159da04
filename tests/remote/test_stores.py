"""The requests to a store."""

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.stores import Store


def test_objects_are_written_once_read_listed_and_removed(store_url, tmp_path):
    store = Store(store_url)
    assert store.find() == {}
    assert store.names() == set()
    assert store.read("a") is None
    local = tmp_path / "file"
    local.write_bytes(b"content")
    with local.open("rb") as file:
        assert store.put("b/c", file, size=6).bytes == 6
    assert store.create("a", b"small")
    assert not store.create("a", b"other")
    assert store.read("a") == b"small"
    assert {name: each.bytes for name, each in store.find().items()} == {"a": 5, "b/c": 6}
    assert store.names() == {"a", "b"}
    assert store.get("b/c", tmp_path / "again", size=6)
    assert (tmp_path / "again").read_bytes() == b"conten"
    assert not store.get("none", tmp_path / "none")
    store.remove("b/c")
    store.remove("b/c")
    assert store.find().keys() == {"a"}
    assert Store(f"{store_url}/a").find().keys() == {""}


def test_what_cannot_be_used_is_one_line():
    with pytest.raises(UserError, match=r"^nothing://x cannot be used: Protocol not known"):
        Store("nothing://x")
