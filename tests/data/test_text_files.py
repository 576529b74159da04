"""Text files that are none: without an end or without line ends."""

import gzip
import io
import os
import time

import pytest

from flaxformer_mt.data.corpora import text_files
from flaxformer_mt.data.corpora.text_files import MAX_LINE_BYTES, arriving_lines, read_lines
from flaxformer_mt.errors import UserError


def refusal(function, *arguments):
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        list(function(*arguments))
    assert time.monotonic() - start < 2
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_long_line_is_named(tmp_path, suffix):
    path = tmp_path / f"train.en{suffix}"
    content = b"one\n" + b"a" * (MAX_LINE_BYTES - 1) + b"\n" + b"b" * 60_000_000
    path.write_bytes(gzip.compress(content, 1) if suffix else content)
    assert f"{path}, line 3: longer than 1,048,576 bytes" in refusal(read_lines, path)
    path.write_bytes(gzip.compress(content[:-60_000_000]) if suffix else content[:-60_000_000])
    assert list(map(len, read_lines(path))) == [3, MAX_LINE_BYTES - 1]


def test_a_long_line_that_arrives_is_named():
    content = b"one\n" + b"b" * 60_000_000
    message = refusal(arriving_lines, Stream(content), "standard input", 10**12)
    assert "standard input, line 2: longer than 1,048,576 bytes" in message


class Stream(io.BytesIO):
    """Bytes that are always available, as those of a file."""

    def fileno(self):
        return os.open("/dev/zero", os.O_RDONLY)


def test_what_is_no_text_file_is_named(tmp_path):
    assert "/dev/zero: a device, not a file" in refusal(read_lines, text_files.Path("/dev/zero"))
    assert f"{tmp_path}: a folder, not a file" in refusal(read_lines, tmp_path)
