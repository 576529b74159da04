"""The public names of the package, and what importing it costs."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import flaxformer_mt


@pytest.mark.parametrize("name", flaxformer_mt.__all__)
def test_public_names_are_importable(name):
    assert getattr(flaxformer_mt, name)
    assert name in dir(flaxformer_mt)


def test_unknown_names():
    with pytest.raises(AttributeError, match="flaxformer_mt attribute Trasnlator"):
        flaxformer_mt.Trasnlator  # noqa: B018


def test_importing_the_package_is_cheap():
    program = (
        "import sys\n"
        "import flaxformer_mt\n"
        "heavy = {'jax', 'numpy', 'flax', 'orbax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
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
    files = {path for path in root.rglob("*.*") if path.parent.name != "__pycache__"}
    others = {path for path in files if path.suffix != ".py"}
    assert len(others) >= 4
    assert packed == {path for path in others if path.is_file()}


@pytest.mark.slow
def test_the_wheel_has_every_module_and_the_configurations(tmp_path):
    """Its commands work in any folder, without the clone."""
    root, clone, place = Path(flaxformer_mt.__file__).parents[1], tmp_path / "clone", tmp_path / "x"
    place.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("flaxformer_mt", "configs"):
        shutil.copytree(root / name, clone / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, clone)
    build = "import setuptools.build_meta as build, sys; build.build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", build, tmp_path]
    subprocess.run(command, cwd=clone, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    expected = {path.relative_to(clone) for path in clone.glob("flaxformer_mt/**/*.py")}
    expected |= {Path("flaxformer_mt/configs", path.name) for path in clone.glob("configs/*.py")}
    assert {path.relative_to(place) for path in place.rglob("*.py")} == expected
    options = ["--config=first_hour", f"--workdir={tmp_path / 'run'}", "--data.path=missing.tsv"]
    done = subprocess.run(
        [sys.executable, "-m", "flaxformer_mt", "train", *options],
        capture_output=True, text=True, check=False, cwd=place,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.stderr.count("\n") == 1
    assert "data.path=missing.tsv" in done.stderr
