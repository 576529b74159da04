"""Code of public repositories, fetched by git into a cache of the user."""

import contextlib
import functools
import importlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest


@contextlib.contextmanager
def imported(url: str, commit: str, module: str) -> Iterator[ModuleType]:
    """Imports a module of a repository, which is forgotten afterwards.

    The running test is skipped if git cannot fetch the repository. Git's `url.FOLDER.insteadOf`
    fetches it from a clone.

    Args:
      url: of the repository, "https://github.com/owner/name".
      commit: the commit's hash, which also verifies the content.
      module: the name of the module, from the top of the repository.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "flaxformer_mt" / commit
    if not folder.is_dir() and (complaint := _fetch(url, commit, folder)):
        pytest.skip(f"git cannot fetch {url}: {complaint}")
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield importlib.import_module(module)


@functools.cache  # Without a network, one attempt is enough.
def _fetch(url: str, commit: str, folder: Path) -> str:
    """Fetches one commit and puts its files into a folder; returns what git complains about."""
    bare = folder.with_suffix(".git")
    bare.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", bare]
    options = {"capture_output": True, "timeout": 20, "check": True}
    try:
        subprocess.run([*git, "init", "--quiet", "--bare"], **options)
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", url, commit], **options)
        files = subprocess.run([*git, "archive", commit, "*.py"], **options).stdout
    except subprocess.TimeoutExpired:
        return "no answer within 20 seconds"
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace").strip().splitlines()[-1]
    partial = folder.with_suffix(f".{os.getpid()}")
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(partial, filter="data")
    # The folder appears complete or not at all.
    with contextlib.suppress(OSError):
        partial.rename(folder)
    return ""
