"""Full disks: a limit on the size of files, and file systems that nobody else sees."""

import contextlib
import resource
import shutil
import subprocess
import textwrap

import pytest


@contextlib.contextmanager
def files_no_longer_than(num_bytes):
    """Fails like a write to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def in_private_mounts(script, *arguments, **options):
    """Runs a shell script that may mount file systems which nobody else sees."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-Urm", "true"]).returncode:
        pytest.skip("this system lets nobody mount a file system of their own")
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-ec", textwrap.dedent(script), "sh", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
