"""Configuration files: their mistakes are told in one line, and they can import neighbours."""

import sys
from pathlib import Path

import pytest

from flaxformer_mt.cli import main
from flaxformer_mt.config import ExperimentConfig, to_json
from flaxformer_mt.config.files import included, load_config
from flaxformer_mt.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
HEAD = """from flaxformer_mt import config
from flaxformer_mt.config import *
def get_config():
"""


def refusal(path):
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [
        (
            HEAD + "    return ExperimentConfig(train=TrainConfig(num_stepz=1))",
            4,
            "TrainConfig has no field num_stepz; did you mean num_steps?",
        ),
        (
            HEAD + "    return ExperimentConfig(\n        train=TrainConfig(num_steps=0)\n    )",
            5,
            "train.num_steps=0: must be at least 1",
        ),
        (
            "from flaxformer_mt import presets\nmodel = presets.preset('torch', d_modle=8)",
            2,
            "unknown model option 'd_modle'; did you mean d_model?",
        ),
        ("from flaxformer_mt.config import TrainConfg", 1, "; did you mean TrainConfig?"),
        ("from broken import x", 2, "invalid syntax: x ="),
        (
            HEAD + "    return ExperimentConfig(model={'d_model': 8})",
            4,
            "ExperimentConfig.model={'d_model': 8}: must be a TransformerConfig",
        ),
        (HEAD + "    raise ValueError('one\\ntwo\\x1b[0m')", 4, "ValueError: one\\ntwo\\x1b"),
        (HEAD + "    return get_config()", 4, "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_line(tmp_path, code, line, message):
    (tmp_path / "base.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("y = 1\nx =\n")
    path = tmp_path / "config.py"
    path.write_text(code)
    told = refusal(path)
    name = tmp_path / "broken.py" if "broken" in code else path
    assert told.startswith(f"{name}, line {line}: ")
    assert message in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it defines no get_config()"),
        (b"def get_config(): pass", "get_config() returns NoneType, not ExperimentConfig"),
        (b"x = " + b"(" * 10_000, "too many nested parentheses"),
    ],
)
def test_a_file_without_a_configuration_is_named(tmp_path, content, message):
    path = tmp_path / "config.py"
    path.write_bytes(content)
    told = refusal(path)
    assert told.startswith(str(path))
    assert message in told


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"model": ' * 100_000, "nested too deeply"),
        (b'{"train": {"num_steps": ' + b"9" * 4000 + b"}}", "must be at most"),
        (b'{"data": {"path": "\\ud800"}}', "Unicode"),
        (b'{"train": {"num_stepz": 1}}', "train.num_stepz; did you mean train.num_steps?"),
        (b'{"train": {"seed": 1, "seed": 2}}', "'seed' occurs twice"),
    ],
)
def test_a_damaged_json_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    told = refusal(path)
    assert told.startswith(str(path))
    assert message in told


def neighbours(folder, seed):
    """A configuration that takes its values from a module and a package in its folder."""
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "part.py").write_text(f"SEED = {seed}")
    (folder / "base.py").write_text(
        HEAD + "    from package.part import SEED\n"
        "    return ExperimentConfig(train=TrainConfig(seed=SEED))\n"
    )
    (folder / "config.py").write_text("from base import get_config")
    return folder / "config.py"


def test_a_configuration_imports_its_neighbours(tmp_path):
    paths, modules, flag = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    for seed in (3, 4):
        assert load_config(neighbours(tmp_path / str(seed), seed)).train.seed == seed
    assert sys.path == paths
    assert sys.dont_write_bytecode == flag
    assert set(sys.modules) == modules
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_configuration_loads_another_and_defines_classes(tmp_path):
    (tmp_path / "config.json").write_text(to_json(ExperimentConfig()))
    (tmp_path / "inner.py").write_text(
        "from flaxformer_mt.config.files import load_config\n"
        "def get_config(): return load_config(__file__.replace('inner.py', 'config.json'))\n"
    )
    (tmp_path / "outer.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "from flaxformer_mt.config.files import load_config\n"
        "config = load_config(__file__.replace('outer.py', 'inner.py'))\n"
        "@dataclasses.dataclass\nclass Own:\n    size: int = 3\n"
        "def get_config():\n    return config\n"
    )
    assert load_config(tmp_path / "outer.py") == ExperimentConfig()


def test_an_included_configuration_is_loaded_by_its_name(tmp_path, monkeypatch):
    assert included().keys() == {path.stem for path in CONFIGS.glob("*.py")}
    monkeypatch.chdir(tmp_path)
    for name in included():
        assert load_config(name) == load_config(CONFIGS / f"{name}.py")
    (tmp_path / "first_hour").write_text(HEAD + "    return ExperimentConfig()")
    assert load_config("first_hour") == ExperimentConfig()
    for name in ("first_our", "configs/first_hour.py", "first-hour"):
        assert refusal(name) == f"there is no file {name}; did you mean first_hour?"


def test_included_configurations_are_listed_and_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(included())
    assert all(len(line) <= 120 and len(line.split()) > 4 for line in lines)
    assert "  One file of your own, on a laptop; docs/first-hour.md has the whole way." in lines[0]
    for arguments in (["forkme"], ["wmt14_en_de_big", "new/big.py"]):
        assert main(["configs", "--copy", *arguments]) == 0
        path = (tmp_path / arguments[-1]).with_suffix(".py")
        assert f"--config={path.relative_to(tmp_path)}" in capsys.readouterr().out
        assert load_config(path) == load_config(arguments[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forkmee"], "--copy forkmee: there is no such configuration; did you mean forkme?"),
        (["x"], "there is no such configuration; flaxformer-mt configs lists them"),
        (["forkme", "a.py", "b.py"], "--copy forkme a.py b.py: give a name and at most one file"),
        (["forkme", "mine.py"], "mine.py exists: remove it, or give another file"),
    ],
)
def test_a_copy_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("mine")
    assert main(["configs", "--copy", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "mine"
