"""A lease: the lock of a remote run folder, a file with a time that its holder renews."""

import json
import os
import threading
import time
import uuid
from typing import Any

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.copies import LEASE
from flaxformer_mt.remote.stores import Store

SECONDS = 60.0
"""After this time without a renewal, the holder counts as dead."""
_RENEWALS = 4
_SETTLING_SECONDS = 1.0


class Lease:
    """Held by the process that trains in a remote folder: a context manager.

    `UserError` if another process holds it. One whose holder has died is taken over. The first
    writer wins where the store has conditional writes, as S3 and Google Cloud Storage; when two
    processes take over at the same time, the last.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = {"process": f"{os.getpid()} on {os.uname().nodename}", "id": uuid.uuid4().hex}
        self._renewed = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, daemon=True)

    def __enter__(self) -> "Lease":
        if not self._write(is_new=True):
            self._take_over()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._is_own(self._read()):
            self._store.remove(LEASE)

    def require(self) -> None:
        """Raises `UserError` if another process has taken the lease over.

        It can do so when the store could not be reached for a minute.
        """
        if time.monotonic() - self._renewed > SECONDS / 2:
            self._renew()

    def _take_over(self) -> None:
        found = self._read()
        age = time.time() - found.get("time", 0.0)
        if age > SECONDS:
            # The clock of the holder may be late: it would renew the lease in the meantime.
            time.sleep(SECONDS / _RENEWALS)
            again = self._read()
            if again == found or not again:
                self._write()
                time.sleep(_SETTLING_SECONDS)
                if self._is_own(self._read()):
                    return
                again = self._read()
            found, age = again, time.time() - again.get("time", 0.0)
        raise UserError(
            f"process {found.get('process')} is training in {self._store.url} already (it said so "
            f"{max(age, 0):.0f} s ago): wait for it, stop it, or give another --workdir. If it was "
            f"killed, try again {SECONDS:.0f} s after that"
        )

    def _renew_regularly(self) -> None:
        while not self._stop.wait(SECONDS / _RENEWALS):
            try:
                self._renew()
            except UserError:
                # `require` says so before anything is published. The store may be there again then.
                continue

    def _renew(self) -> None:
        found = self._read()
        if not self._is_own(found):
            raise UserError(
                f"process {found.get('process', 'unknown')} has taken over {self._store.url}, when "
                "it could not be reached from here: nothing more is published"
            )
        self._write()

    def _read(self) -> dict[str, Any]:
        content = self._store.read(LEASE)
        try:
            found = json.loads(content or b"{}")
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    def _write(self, is_new: bool = False) -> bool:
        begun = time.monotonic()
        content = json.dumps({**self._own, "time": time.time()}).encode()
        if not self._store.write(LEASE, content, is_new):
            return False
        self._renewed = begun
        return True

    def _is_own(self, found: dict[str, Any]) -> bool:
        return found.get("id") == self._own["id"]
