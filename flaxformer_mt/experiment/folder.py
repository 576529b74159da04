"""The run folder while a run starts."""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import jax

from flaxformer_mt import distributed
from flaxformer_mt.data.stream.token_store import has_parts
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import step_folders
from flaxformer_mt.runs.folder import locked
from flaxformer_mt.runs.layout import CACHE, CONFIG, METRICS


@contextlib.contextmanager
def open_folder(workdir: str | Path, announce: Callable[[str], None] = print) -> Iterator[Path]:
    """Creates and locks a run folder; removes a new one if no run was written to it.

    So, too, if the run was refused before it trained: the corrected command then starts anew. What
    was tokenized before an interruption remains.

    Raises:
      UserError: another process trains there, or the folder cannot be written to.
    """
    workdir = Path(workdir)
    if not distributed.is_main():
        yield workdir
        return
    before = set(workdir.iterdir()) if workdir.is_dir() else None
    with locked(workdir, announce):
        try:
            yield workdir
        except UserError:
            if not _has_trained(workdir):
                _remove_new(workdir, before)
            raise
        finally:
            is_run = (workdir / CONFIG).exists()
            if before is None and not is_run and not has_parts(workdir / CACHE):
                _remove_new(workdir, before)


def _remove_new(workdir: Path, before: Collection[Path] | None) -> None:
    if before is None:
        # NFS keeps files that are still open, such as the lock.
        shutil.rmtree(workdir, ignore_errors=True)
    elif workdir / CONFIG not in before:
        for path in {*workdir.iterdir()}.difference(before):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _has_trained(workdir: Path) -> bool:
    metrics = workdir / METRICS
    return step_folders.has_any(workdir) or (metrics.exists() and metrics.stat().st_size > 0)


_SHARED_SECONDS = 60
"""How long a file system may take to show other hosts what one of them has written: that of NFS."""


def require_shared(workdir: Path) -> None:
    """Checks that a process other than the first sees the run folder that the first has written."""
    end = time.monotonic() + _SHARED_SECONDS
    while not (workdir / CONFIG).exists():
        if time.monotonic() > end:
            raise UserError(
                f"--workdir={workdir}: process {jax.process_index()} does not see what process 0 "
                "has written there: give a folder on a file system that all processes share"
            )
        time.sleep(0.5)
