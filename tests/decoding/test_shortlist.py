import copy
import gzip
import itertools
import os
import struct
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.decoding.shortlist import Shortlist, best_translations
from flaxformer_mt.errors import UserError


class Vocabulary:
    """A vocabulary that splits words greedily into their longest pieces."""

    eos_id = 0

    def __init__(self, *pieces):
        self._pieces = ["</s>", "<unk>", *pieces]
        self.vocab_size = len(self._pieces)

    def pieces(self, tokens):
        return [self._pieces[token] for token in tokens]

    def encode(self, texts):
        return [self._encode("\u2581" + text) for text in texts]

    encode_parts = encode

    def _encode(self, text):
        if not text:
            return []
        piece = next(text[:end] for end in range(len(text), 0, -1) if text[:end] in self._pieces)
        return [self._pieces.index(piece), *self._encode(text[len(piece) :])]


SOURCE = Vocabulary("\u2581the", "\u2581dog", "s", "\u2581hot", "dog")  # 2 to 6
TARGET = Vocabulary("\u2581der", "\u2581die", "\u2581Hund", "e", "\u2581das", "\u2581", "D")  # to 8
SEPARATE = types.SimpleNamespace(source=SOURCE, target=TARGET, joint=False)
JOINT = types.SimpleNamespace(source=TARGET, target=TARGET, joint=True)

PIECES = """\
\u2581der \u2581the 0.3
\u2581die \u2581the 0.4
\u2581das \u2581the 0.2
\u2581die \u2581the 0.1
NULL \u2581dog 0.9
e NULL 0.9
\u2581Hund \u2581dog 0.8
\u2581die \u2581dog 0
\u2581Katze \u2581dog 0.9
e s 0.5
"""


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "lex"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def translations(shortlist, token):
    return shortlist.translations[shortlist.offsets[token] : shortlist.offsets[token + 1]].tolist()


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_table_of_pieces(write, compress):
    path = write(compress(PIECES.encode()))
    shortlist = Shortlist.read(path, SEPARATE, first=2, best=2)
    assert translations(shortlist, 2) == [3, 2]  # die, der; das is the third best.
    assert translations(shortlist, 3) == [4]
    assert translations(shortlist, 4) == [5]
    assert translations(shortlist, 0) == translations(shortlist, 6) == []


def test_with_one_vocabulary_the_source_can_be_copied(write):
    same = types.SimpleNamespace(source=TARGET, target=copy.copy(TARGET), joint=False)
    for tokenizers in (JOINT, same):
        shortlist = Shortlist.read(write("\u2581der \u2581die 1"), tokenizers, first=0, best=1)
        assert shortlist.allowed([3, 5]).tolist() == [0, 2, 3, 5]


def test_a_table_of_words_applies_to_their_pieces(write):
    table = "der the 0.6\nHunde dogs 0.7\nDe hotdog 0.2\n"
    shortlist = Shortlist.read(write(table), SEPARATE, first=0, best=9)
    assert translations(shortlist, 3) == translations(shortlist, 4) == [4, 5]
    assert translations(shortlist, 5) == translations(shortlist, 6) == [5, 7, 8]


def binary(first, best, lists):
    """Returns the translations of tokens 0, 1, ... in Marian's binary format."""
    offsets = np.cumsum([0, *map(len, lists)]).astype("<u8")
    tokens = np.array(list(itertools.chain(*lists)), "<u4")
    body = struct.pack("<4Q", first, best, len(offsets), len(tokens))
    body += offsets.tobytes() + tokens.tobytes()
    checksum = 0
    for (word,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8]):
        checksum ^= (word + 0x9E3779B9 + checksum * 64 + checksum // 4) % 2**64
    return struct.pack("<2Q", 0xF11A48D5013417F5, checksum) + body


LISTS = [[], [], [2, 3], [4], [5], [6], [2, 8]]


@pytest.mark.parametrize("lists", [LISTS, [*LISTS[:-1], [2]]])  # 7 and 6 tokens
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_the_binary_format_overrides_first_and_best(write, lists, compress):
    path = write(compress(binary(3, 2, lists)))
    shortlist = Shortlist.read(path, SEPARATE, first=1, best=1)
    assert [translations(shortlist, token) for token in range(7)] == lists
    assert shortlist.allowed([2, 5]).tolist() == [0, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("die the", 'line 1 is not "target source probability": die the'),
        ("der the 1\na b one", 'line 2 is not "target source probability": a b one'),
        (gzip.compress(b"die the 1", mtime=0)[:-9], "end-of-stream marker"),
        (binary(1, 1, LISTS)[:40], "truncated"),
        (binary(1, 1, LISTS)[:-9] + b"\x01" + binary(1, 1, LISTS)[-8:], "checksum is wrong"),
        (binary(1, 1, LISTS[:-1]), "another vocabulary: it has 6 source tokens, the model 7"),
        (binary(1, 1, [*LISTS[:-1], [2**32 - 1]]), "another vocabulary"),
        ("die the inf", "line 1: inf is not a probability"),
        ("die the 12", "line 1: 12 is not a probability"),
        ("", "has no translation of any source token"),
        (gzip.compress(b"\0" * 300_000_000, 1), "268,435,456 bytes when decompressed"),
    ],
)
def test_a_damaged_table_is_rejected(write, content, cause):
    with pytest.raises(UserError, match=f"^decode.shortlist=.*lex.*{cause}"):
        Shortlist.read(write(content), SEPARATE, first=1, best=1)


def test_a_missing_table_is_rejected(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        Shortlist.read(tmp_path / "lex", SEPARATE, first=1, best=1)
    os.mkfifo(tmp_path / "lex")
    with pytest.raises(UserError, match=r"^decode.shortlist=.*lex: a named pipe, not a file"):
        Shortlist.read(tmp_path / "lex", SEPARATE, first=1, best=1)


entries = st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from([0.1, 0.2, 0.5]))


@given(st.lists(entries), st.integers(1, 3))
def test_best_translations_match_a_slow_implementation(table, best):
    sources, targets, probabilities = zip(*table, strict=True) if table else ((), (), ())
    offsets, kept = best_translations(
        np.array(sources, np.int64),
        np.array(targets, np.int32),
        np.array(probabilities, np.float64),
        source_size=4,
        best=best,
    )
    assert len(offsets) == 5
    for source in range(4):
        highest = {}
        for s, t, p in table:
            if s == source:
                highest[t] = max(p, highest.get(t, 0))
        expected = sorted(highest, key=lambda t: (-highest[t], t))[:best]
        assert kept[offsets[source] : offsets[source + 1]].tolist() == expected
