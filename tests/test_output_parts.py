"""Outputs that are written in parts, interrupted anywhere and continued."""

import random

import pytest

from flaxformer_mt.cli.output_parts import Shard, part_writer
from flaxformer_mt.errors import UserError

SETTINGS = {"search": {"beam_size": 4}, "models": [["run", 3]]}
LINES = 17


class Killed(Exception):
    pass


def lines_of(number, lines_each):
    return [f"{number} ||| text ü {'x' * number} ||| {each}" for each in range(lines_each)]


def continue_part(output, shard, lines_each=1, most=LINES, settings=SETTINGS):
    """Writes the output of up to `most` input lines; returns the numbers of those written."""
    written = []
    with part_writer(output, shard, settings, shard.lines(LINES), lines_each) as (inputs, write):
        for number in inputs:
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
@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_that_are_interrupted_at_any_byte(tmp_path, count, lines_each):
    output = tmp_path / "out.txt"
    output.write_text("of an earlier command\n")
    rng = random.Random(count)
    unfinished = [Shard(index, count) for index in range(count)]
    while unfinished:
        shard = rng.choice(unfinished)
        try:
            continue_part(output, shard, lines_each, rng.randrange(4))
        except Killed:
            partial = shard.path(output).with_name(f"{shard.path(output).name}.partial")
            content = partial.read_bytes()
            partial.write_bytes(content[: len(content) - rng.randrange(40)])
        else:
            unfinished.remove(shard)
        if unfinished:
            assert output.read_text() == "of an earlier command\n"
    assert output.read_bytes() == whole(lines_each)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.txt", "out.txt.settings.json"]
    assert continue_part(output, shard, lines_each) == []


def test_what_a_power_cut_left_unwritten_is_written_again(tmp_path):
    (tmp_path / "out.0-of-1.partial").write_bytes(whole()[:60] + bytes(20) + whole()[80:])
    assert len(continue_part(tmp_path / "out", Shard())) > LINES - 5
    assert (tmp_path / "out").read_bytes() == whole()


def test_parts_of_other_settings_are_not_continued(tmp_path):
    with pytest.raises(Killed):
        continue_part(tmp_path / "out", Shard(0, 2), most=2)
    for shard, settings in (
        (Shard(0, 2), SETTINGS | {"search": {"beam_size": 1}}),
        (Shard(1, 2), SETTINGS | {"models": [["run", 4]]}),
        (Shard(0, 3), SETTINGS),
    ):
        with pytest.raises(UserError, match=r"other (search|models|shards): give another --output"):
            continue_part(tmp_path / "out", shard, settings=settings)
    assert continue_part(tmp_path / "out", Shard(0, 2)) == [*range(2, LINES // 2)]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "1/2/3", "٠/١", "a/b"])
def test_what_is_no_shard(text):
    with pytest.raises(UserError, match="such as 0/4"):
        Shard.parse(text)
