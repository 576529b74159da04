"""The command `attention`, on a trained model."""

import json
import re

import pytest

from flaxformer_mt.cli import main


@pytest.fixture
def command(trained_run, tmp_path, capsys):
    def execute(*arguments):
        code = main(["attention", "--run", str(trained_run), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return execute


def test_the_page_of_a_sentence_and_its_translation(command, trained_run, tmp_path, capsys):
    page = tmp_path / "attention.html"
    code, printed, error = command("--source", "twelve kilometers", "--output", page)
    assert (code, error) == (0, "")
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    cross = json.loads(found)["kinds"][-1]
    target = printed.strip().removeprefix(f"{page}: twelve kilometers -> ")
    assert target
    shown = [(" " if each["starts"] else "") + each["text"] for each in cross["rows"]["tokens"]]
    assert "".join(shown[:-1]).replace("␣", "").strip() == target
    assert f"<title>Attention of {trained_run}, step 200</title>" in text

    # The same, where the translation is given.
    given = tmp_path / "given.html"
    options = ("--source", "twelve kilometers", "--target", target, "--output", given)
    assert command(*options)[0] == 0
    assert given.read_text(encoding="utf-8") == text


def test_errors_are_one_line(command, tmp_path):
    ending = ("--source", "twelve", "--target", "zwölf", "--output", tmp_path / "a.html")
    for arguments, message in {
        ("--source", "a", "--output", "a.gif"): "a.gif: the name of a picture must end in one",
        ("--source", "a", "--output", "README.md/a.html"): "README.md is not a folder",
        ("--source", " ", "--output", tmp_path / "a.html"): "the source is empty",
        (*ending, "--beam-size", "2"): "search options other than --first-token have no",
        (*ending, "--first-token", "no token"): "--first-token=no token is not a token",
        (*ending, "--checkpoint", "7"): "7",
    }.items():
        code, printed, error = command(*arguments)
        assert (code, printed) == (1, "")
        assert error.count("\n") == 1
        assert error.startswith("flaxformer-mt: error: ")
        assert message in error
    assert not any(tmp_path.iterdir())
