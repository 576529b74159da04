"""Files of others are read within limits, and what is wrong with them is told in one line."""

import gzip
import os

import pytest

from flaxformer_mt import input_files
from flaxformer_mt.errors import UserError


def refusal(function, *arguments):
    with pytest.raises(UserError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_a_file_is_read(tmp_path):
    path = tmp_path / "settings.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, "\\ud83d\\ude00"]}')
    assert input_files.read_json(path) == {"a": [1, 2.5, "\U0001f600"]}
    link = tmp_path / "link"
    link.symlink_to(path)
    assert input_files.read_bytes(link) == path.read_bytes()


@pytest.mark.parametrize("limit", [10, 11])
def test_a_larger_file_is_refused(tmp_path, limit):
    path = tmp_path / "file"
    path.write_bytes(b"12345678901")
    if limit == 11:
        assert input_files.read_bytes(path, limit) == b"12345678901"
    else:
        assert f"{path} has more than 10 bytes" in refusal(input_files.read_bytes, path, limit)


def test_what_is_no_regular_file_is_named(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(input_files.read_bytes, pipe) == f"{pipe}: a named pipe, not a file"
    assert "a folder, not a file" in refusal(input_files.read_bytes, tmp_path)
    assert "/dev/zero: a device" in refusal(input_files.read_bytes, "/dev/zero")
    assert "there is no such file" in refusal(input_files.read_bytes, tmp_path / "absent")
    assert "cannot be read" in refusal(input_files.read_bytes, tmp_path / ("a" * 300))
    assert "null" in refusal(input_files.read_bytes, "a\0b")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"[" + b"1" * 5000 + b"]", "too many digits"),
        (b'{"a": "\\ud800"}', "not valid Unicode"),
        (b'{"a": "\\uD800"}', "not valid Unicode"),
        (b'"\xff"', "not valid Unicode"),
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b"\0" * 100, "not JSON"),
    ],
)
def test_damaged_json_is_named(content, reason):
    message = refusal(input_files.parse_json, content, "some.json")
    assert message.startswith("some.json is damaged: ")
    assert reason in message


def test_decompression_is_limited():
    bomb = gzip.compress(b"\0" * 10_000_000)
    assert input_files.decompressed(b"plain", 3) == b"plain"
    assert len(input_files.decompressed(bomb, 10_000_000)) == 10_000_000
    with pytest.raises(ValueError, match=r"more than 9,999,999 bytes"):
        input_files.decompressed(bomb, 9_999_999)
    with pytest.raises(ValueError, match="damaged gzip file"):
        input_files.decompressed(bomb[:100], 10_000_000)


def test_a_message_is_one_line_whatever_it_quotes():
    message = str(UserError("the field a\nb\r\x1b[31m\u2028\ud800 is unknown"))
    assert message == "the field a\\nb\\r\\x1b[31m\\u2028\\ud800 is unknown"
    long = str(UserError("x.json: " + "1" * 10**6 + ": must be smaller"))
    assert len(long) < 5000
    assert long.startswith("x.json: 1")
    assert long.endswith("1: must be smaller")
