"""Commands and functions that write make the folders of their outputs, at any depth."""

import inspect

import pytest

import flaxformer_mt as fmt
from flaxformer_mt.cli import main, program

TEXT = ["one meter", "two meters", "three meters"]


@pytest.fixture
def text(tmp_path):
    for name in ("train.en", "train.fr"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in TEXT))
    return tmp_path / "train.en"


# Names of commands with outputs, and the rest of a command line that writes "new/folder/X".
OUTPUTS = {
    "translate": ["--run={run}", "--input={text}", "--output={out}"],
    "translate --resume": ["--run={run}", "--input={text}", "--output={out}", "--resume"],
    "evaluate": ["--run={run}", "--source={text}", "--reference={text}", "--output={out}"],
    "lexicon": ["--run={run}", "--source={text}", "--target={text}", "--output={out}"],
    "average": ["--run={run}", "--last=1", "--output={out}"],
    "plot": ["--run={run}", "--output={out}.svg"],
    "attention": ["--run={run}", "--source=one meter", "--output={out}.html"],
    "convert": ["--from=flaxformer_mt", "--to=marian", "{run}", "{out}"],
    "convert to a file": ["--from=flaxformer_mt", "{run}", "{out}.safetensors"],
    "parity": [
        "--family=tunz", "--set", "num_encoder_layers=1", "num_decoder_layers=1",
        "--json={out}.json", "--html={out}/html", "--junit={out}/more/junit",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "parity")) for name in OUTPUTS],
)
def test_the_folders_of_an_output_are_made(trained_run, text, tmp_path, command):
    given = {"run": trained_run, "text": text, "folder": tmp_path, "out": tmp_path / "new/folder/X"}
    name, *_ = command.split()
    if name == "prepare":
        pytest.importorskip("tensorflow_datasets")
    assert main([name, *(part.format(**given) for part in OUTPUTS[command])]) == 0
    assert [path for path in tmp_path.glob("new/folder/X*") if not path.match("*.settings.json")]


def test_every_command_with_an_output_is_tried():
    outputs = {"output_file", "output_folder", "json_file"}
    writing = {
        name
        for group in program.COMMANDS.values()
        for name, command in group.items()
        if outputs & {*inspect.signature(command).parameters}
    }
    assert writing == {command.split()[0] for command in OUTPUTS}
    assert len(writing) == 8


def test_a_model_is_saved_in_a_new_folder(trained_run, tmp_path):
    saved = fmt.load(trained_run).save(tmp_path / "new" / "folder" / "X")
    assert saved.latest_step == 0
    assert saved.folder == tmp_path / "new" / "folder" / "X"
