"""The remote folder of a run that is being trained or prepared."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from flaxformer_mt.errors import UserError
from flaxformer_mt.remote.copies import Copy, new_copy, upload_or_keep
from flaxformer_mt.remote.lease import Lease

_PERIOD_SECONDS = 5.0
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def training_folder(url: str) -> Iterator[Path]:
    """Yields a local copy of a remote run folder, whose changes are published while the block runs.

    Every checkpoint is, soon after it was written, and everything at the end, also after an
    exception. If the store cannot be reached, this is tried again; at the end it is an error.

    Raises:
      UserError: another process trains there, or the store cannot be used.
    """
    with new_copy(url) as copy, Lease(copy.store) as lease:
        copy.download()
        copy.forget_unfinished()
        stop = threading.Event()
        publisher = threading.Thread(target=_publish_regularly, args=(copy, lease, stop))
        publisher.start()
        try:
            yield copy.local
        finally:
            stop.set()
            publisher.join()
            lease.require()
            upload_or_keep(copy)


def _publish_regularly(copy: Copy, lease: Lease, stop: threading.Event) -> None:
    last = ""
    while not stop.wait(_PERIOD_SECONDS):
        try:
            lease.require()
            copy.upload()
            last = ""
        except (UserError, OSError) as error:
            if str(error) != last:
                _log.warning("%s; trying again", error)
            last = str(error)
