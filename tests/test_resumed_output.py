"""Outputs that are interrupted anywhere and continued."""

import random

import pytest

from flaxformer_mt.cli.resumed_output import resumed_writer
from flaxformer_mt.errors import UserError

SETTINGS = {"search": {"beam_size": 4}, "models": [["run", 3]]}
LINES = 17


class Killed(Exception):
    pass


def lines_of(number, lines_each):
    return [f"{number} ||| text ü {'x' * number} ||| {each}" for each in range(lines_each)]


def continued(output, lines_each=1, most=LINES, settings=SETTINGS):
    """Writes the output of up to `most` input lines; returns the numbers of those written."""
    written = []
    with resumed_writer(output, settings, LINES, lines_each) as (done, write):
        for number in range(done, LINES):
            if len(written) == most:
                raise Killed
            for line in lines_of(number, lines_each):
                write([line])
            written.append(number)
    return written


def whole(lines_each=1):
    lines = [line for number in range(LINES) for line in lines_of(number, lines_each)]
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.parametrize("lines_each", [1, 3])
def test_an_output_that_is_interrupted_at_any_byte(tmp_path, lines_each):
    output, partial = tmp_path / "out.txt", tmp_path / "out.txt.partial"
    output.write_text("of an earlier command\n")
    rng = random.Random(lines_each)
    is_complete = False
    while not is_complete:
        assert output.read_text() == "of an earlier command\n"
        try:
            continued(output, lines_each, rng.randrange(6))
            is_complete = True
        except Killed:
            content = partial.read_bytes()
            partial.write_bytes(content[: len(content) - rng.randrange(40)])
    assert output.read_bytes() == whole(lines_each)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "out.txt.settings.json"]
    assert continued(output, lines_each) == []


def test_nothing_that_is_whole_is_written_twice(tmp_path):
    with pytest.raises(Killed):
        continued(tmp_path / "out", most=5)
    assert continued(tmp_path / "out") == [*range(5, LINES)]


def test_what_a_power_cut_left_unwritten_is_written_again(tmp_path):
    with pytest.raises(Killed):
        continued(tmp_path / "out", most=1)
    (tmp_path / "out.partial").write_bytes(whole()[:60] + bytes(20) + whole()[80:])
    assert len(continued(tmp_path / "out")) > LINES - 5
    assert (tmp_path / "out").read_bytes() == whole()


def test_outputs_of_other_settings_are_not_continued(tmp_path):
    with pytest.raises(Killed):
        continued(tmp_path / "out", most=2)
    for settings in ({"search": {"beam_size": 1}}, {"models": [["run", 4]]}):
        with pytest.raises(UserError, match=r"other (search|models): give another --output"):
            continued(tmp_path / "out", settings=SETTINGS | settings)
    assert continued(tmp_path / "out") == [*range(2, LINES)]


def test_an_output_is_written_by_one_process(tmp_path):
    with (
        resumed_writer(tmp_path / "out", SETTINGS, 3, 1),
        pytest.raises(UserError, match="another process"),
    ):
        continued(tmp_path / "out")


def test_a_file_that_is_not_of_the_command_is_kept(tmp_path):
    (tmp_path / "out.partial").write_text("mine")
    with pytest.raises(UserError, match=r"out\.partial is not of this command"):
        continued(tmp_path / "out")
    assert (tmp_path / "out.partial").read_text() == "mine"


def test_an_output_that_was_deleted_is_made_again(tmp_path):
    output = tmp_path / "out"
    continued(output)
    output.unlink()
    continued(output)
    assert output.read_bytes() == whole()
