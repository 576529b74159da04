"""Only one process trains in a remote folder."""

import json
import time

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import lease
from flaxformer_mt.remote.lease import Lease
from flaxformer_mt.remote.stores import Store


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", 1.0)
    monkeypatch.setattr(lease, "_SETTLING_SECONDS", 0.1)


@pytest.mark.slow_except("file")
def test_a_second_process_is_refused_and_the_next_is_not(store_url):
    with Lease(Store(store_url)):
        for wait in (0, 2.5):  # It is renewed.
            time.sleep(wait)
            with pytest.raises(UserError, match=r"process \d+ on .* is training in .* already"):
                Lease(Store(store_url)).__enter__()
    assert Store(store_url).list() == {}
    with Lease(Store(store_url)) as held:
        held.require()


@pytest.mark.parametrize("content", [b'{"id": "a", "process": "1 on x", "time": 5}', b"", b"[1]"])
def test_the_lease_of_a_killed_process_is_taken_over(store_url, content):
    Store(store_url).write(lease.LEASE, content)
    with Lease(Store(store_url)) as held:
        held.require()
        with pytest.raises(UserError, match="is training"):
            Lease(Store(store_url)).__enter__()


def test_one_that_is_renewed_by_a_late_clock_is_not_taken_over(store_url, monkeypatch):
    store = Store(store_url)
    store.write(lease.LEASE, b'{"id": "a", "process": "1 on x", "time": 5}')

    def sleep(seconds):
        store.write(lease.LEASE, b'{"id": "a", "process": "1 on x", "time": 6}')

    monkeypatch.setattr(lease.time, "sleep", sleep)
    with pytest.raises(UserError, match="process 1 on x is training"):
        Lease(Store(store_url)).__enter__()


def test_a_process_that_has_lost_it_publishes_nothing(store_url):
    store = Store(store_url)
    other = json.dumps({"id": "other", "process": "2 on y", "time": time.time()}).encode()
    with Lease(store) as held:
        store.write(lease.LEASE, other)
        time.sleep(0.6)
        with pytest.raises(UserError, match="process 2 on y has taken over"):
            held.require()
    assert store.read(lease.LEASE) == other
