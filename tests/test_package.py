"""The public names of the package, and what importing it costs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flaxformer_mt


@pytest.mark.parametrize("name", flaxformer_mt.__all__)
def test_public_names_are_importable(name):
    assert getattr(flaxformer_mt, name)
    assert name in dir(flaxformer_mt)


def test_unknown_names():
    with pytest.raises(AttributeError, match="'flaxformer_mt' has no attribute 'Trasnlator'"):
        flaxformer_mt.Trasnlator  # noqa: B018


def test_importing_the_package_is_cheap():
    program = (
        "import sys, time; before = set(sys.modules); start = time.process_time()\n"
        "import flaxformer_mt\n"
        "seconds = time.process_time() - start; heavy = {'jax', 'numpy', 'flax', 'orbax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert seconds < 0.2, seconds\n"
        "print(flaxformer_mt.__version__, flaxformer_mt.Translator)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert "flaxformer_mt.decoding.translator.Translator" in done.stdout


def test_files_that_are_not_modules_are_part_of_the_wheel():
    root = Path(flaxformer_mt.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, names in patterns.items()
        for name in names
        for path in root.parent.joinpath(*package.split(".")).glob(name)
    }
    others = {path for path in root.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert len(others) >= 4
    assert packed == {path for path in others if path.is_file()}
