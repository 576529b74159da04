import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from flaxformer_mt.data.stream import packing
from flaxformer_mt.data.stream.packing import (
    Sentences,
    decoder_inputs,
    pack,
)


def pack_rows(sentences, rows, row_length, pad_id):
    members = np.array([pair for row in rows for pair in row], np.int64)
    counts = np.array([len(row) for row in rows])
    return pack(sentences.take(members), counts, row_length, pad_id)


def plan_rows(*lengths, order=None):
    members, counts = packing.plan_rows(*lengths, order)
    return [row.tolist() for row in np.split(members, counts.cumsum())[:-1]]


SENTENCES = Sentences.from_lists([[11, 12, 2], [21, 2], [31, 32, 33, 2]])


@st.composite
def pair_lengths(draw):
    """Draws row lengths S and T, and pairs of sentence lengths up to them."""
    row_lengths = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    pairs = st.tuples(*(st.integers(1, row_length) for row_length in row_lengths))
    lengths = np.array(draw(st.lists(pairs, min_size=1, max_size=60)))
    return row_lengths, lengths[:, 0], lengths[:, 1]


def test_pack_literal_rows():
    rows = [[0, 1], [], [2]]
    packed = pack_rows(SENTENCES, rows, row_length=6, pad_id=9)
    assert packed.tokens.tolist() == [
        [11, 12, 2, 21, 2, 9],
        [9, 9, 9, 9, 9, 9],
        [31, 32, 33, 2, 9, 9],
    ]
    assert packed.segment_ids.tolist() == [
        [1, 1, 1, 2, 2, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]
    assert packed.positions.tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 2, 3, 0, 0],
    ]
    for array in (packed.tokens, packed.segment_ids, packed.positions):
        assert array.dtype == np.int32


@pytest.mark.parametrize("bos_id", [1, -1])
def test_decoder_inputs_do_not_cross_segment_boundaries(bos_id):
    # The rows are full: a plain shift would not lose a token at the end of the row.
    targets = pack_rows(SENTENCES, [[0, 1], [2]], row_length=5, pad_id=0)
    inputs = decoder_inputs(targets, bos_id=bos_id, pad_id=0)
    assert inputs.tolist() == [
        [bos_id, 11, 12, bos_id, 21],
        [bos_id, 31, 32, 33, 0],
    ]
    assert inputs.dtype == np.int32


def test_take_join_and_truncate():
    taken = SENTENCES.take(np.array([2, 0, 2]))
    assert [taken[i].tolist() for i in range(3)] == [[31, 32, 33, 2], [11, 12, 2], [31, 32, 33, 2]]
    joined = Sentences.join([SENTENCES, taken])
    assert len(joined) == 6
    assert joined[4].tolist() == [11, 12, 2]
    truncated = joined.truncate(3, eos_id=2)
    assert [truncated[i].tolist() for i in range(4)] == [
        [11, 12, 2],
        [21, 2],
        [31, 32, 2],
        [31, 32, 2],
    ]
    assert SENTENCES[2].tolist() == [31, 32, 33, 2]
    # Sentences without an end token get none.
    assert SENTENCES.truncate(3, eos_id=9)[2].tolist() == [31, 32, 33]


def test_plan_fills_gaps_with_the_largest_pair_that_fits():
    # None of the first 16 candidates fits after the first pair, but three later ones do.
    lengths = np.array([6] + [9] * 16 + [2, 3, 1])
    rows = plan_rows(np.ones_like(lengths), lengths, 100, 10)
    assert rows[0] == [0, 18, 19]


def test_plan_rejects_sentences_longer_than_a_row():
    with pytest.raises(ValueError, match="9 tokens does not fit into rows of 8"):
        plan_rows(np.array([1, 9]), np.array([1, 1]), 8, 8)


@hypothesis.given(pair_lengths(), st.integers(0, 3))
def test_plan_places_every_pair_once_and_no_row_overflows(lengths, seed):
    row_lengths, sources, targets = lengths
    order = np.random.default_rng(seed).permutation(len(sources))
    plan = plan_rows(sources, targets, *row_lengths, order=order)
    assert sorted(pair for row in plan for pair in row) == list(range(len(sources)))
    for row in plan:
        assert row
        assert sources[row].sum() <= row_lengths[0]
        assert targets[row].sum() <= row_lengths[1]


@hypothesis.given(pair_lengths(), st.integers(0, 3))
@pytest.mark.parametrize("is_language_model", [False, True])
def test_compiled_and_interpreted_plans_are_equal(is_language_model, lengths, seed):
    pytest.importorskip("numba")
    row_lengths, sources, targets = lengths
    order = np.random.default_rng(seed).permutation(len(sources))
    arguments = sources * (not is_language_model), targets, *row_lengths, order
    compiled = packing.plan_rows(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "compiled", lambda function: None)
        interpreted = packing.plan_rows(*arguments)
    for each, expected in zip(compiled, interpreted, strict=True):
        np.testing.assert_array_equal(each, expected)
        assert each.dtype == expected.dtype == np.int64
