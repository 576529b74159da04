"""Text files that are none: without an end or without line ends."""

import gzip
import io
import os
import time

import pytest

from flaxformer_mt.data.corpora import text_files
from flaxformer_mt.data.corpora.text_files import (
    MAX_LINE_BYTES,
    arriving_lines,
    count_lines,
    opened,
    read_lines,
)
from flaxformer_mt.errors import UserError


def refusal(function, *arguments):
    with pytest.raises(UserError) as caught:
        list(function(*arguments))
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


def test_no_line_waits_longer_than_allowed_while_others_arrive(monkeypatch):
    """One line arrives every 5 ms of a clock that moves with them."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(text_files.select, "select", lambda *streams_and_pause: [True])

    class Arriving(io.BytesIO):
        def read1(self, size=-1):
            now[0] += 0.005
            return self.readline()

    stream = Arriving(b"".join(b"%d\n" % number for number in range(1, 101)))
    groups = arriving_lines(stream, "standard input", 10**12, max_wait=0.1)
    waits = [[now[0] - 0.005 * int(line) for line in group] for group in groups]
    assert sum(map(len, waits)) == 100
    # The wait is noticed when the next line arrives.
    assert max(map(max, waits)) < 0.1 + 2 * 0.005
    assert len(waits) == 5  # They still share batches.


def test_a_line_that_arrives_byte_by_byte():
    class Slow(io.BytesIO):
        def read1(self, size=-1):
            return self.read(1)

        def fileno(self):
            return always.fileno()

    content = b"a" * 100_000
    with open("/dev/zero", "rb") as always:
        groups = list(arriving_lines(Slow(content), "standard input", 10**12))
    assert groups == [[content.decode()]]


@pytest.mark.parametrize("content", [b"no gzip\n", gzip.compress(b"one\ntwo\n", mtime=0)[:-9]])
def test_damaged_files_that_are_read_in_parts_are_named(tmp_path, content):
    path = tmp_path / "source.txt.gz"
    path.write_bytes(content)
    for function in (lambda *arguments: [count_lines(*arguments)], arriving_lines):
        with opened(path) as stream:
            enough = (100,) if function is arriving_lines else ()
            message = refusal(function, stream, str(path), *enough)
        assert f"{path}: damaged gzip file" in message
