import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forks import Commands
from fuzz.world import World


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("this test compiles a library for Linux")
    path = tmp_path_factory.mktemp("calls") / "calls.so"
    source = Path(__file__).with_name("calls.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True)
    return path


@pytest.fixture(scope="session")
def commands(library, tmp_path_factory):
    commands = Commands(library, tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))
