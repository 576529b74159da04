import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from flaxformer_mt.data.packing import (
    PackedRows,
    RowPlan,
    Sentences,
    decoder_inputs,
    pack,
    plan_rows,
    shuffle_plan,
)

SENTENCES = Sentences.from_lists([[11, 12, 2], [21, 2], [31, 32, 33, 2]])


@st.composite
def pair_lengths(draw):
    """Row lengths S and T, and pairs of sentence lengths that do not exceed them."""
    row_lengths = draw(st.tuples(st.integers(1, 20), st.integers(1, 20)))
    pairs = st.tuples(*(st.integers(1, row_length) for row_length in row_lengths))
    lengths = np.array(draw(st.lists(pairs, min_size=1, max_size=60)))
    return row_lengths, lengths[:, 0], lengths[:, 1]


def test_sentences_come_back_as_they_were_stored():
    stored = Sentences.from_lists([[5, 6], [], [7]])
    assert [sentence.tolist() for sentence in (stored[0], stored[1], stored[2])] == [
        [5, 6],
        [],
        [7],
    ]
    assert len(stored) == 3
    assert stored.lengths.tolist() == [2, 0, 1]
    assert stored.tokens.dtype == np.int32


def test_pack_literal_rows():
    rows = [np.array([0, 1]), np.array([], np.int64), np.array([2])]
    packed = pack(SENTENCES, rows, row_length=6, pad_id=9)
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


def test_pack_of_empty_rows_only():
    packed = pack(SENTENCES, [np.array([], np.int64)] * 2, row_length=3, pad_id=7)
    assert packed.tokens.tolist() == [[7, 7, 7], [7, 7, 7]]
    assert not packed.segment_ids.any()


@pytest.mark.parametrize("bos_id", [1, -1])
def test_decoder_inputs_carry_no_token_across_a_segment_border(bos_id):
    # Full to the last position: a plain shift would also lose nothing at the end of the row.
    targets = pack(SENTENCES, [np.array([0, 1]), np.array([2])], row_length=5, pad_id=0)
    inputs = decoder_inputs(targets, bos_id=bos_id, pad_id=0)
    assert inputs.tolist() == [
        [bos_id, 11, 12, bos_id, 21],
        [bos_id, 31, 32, 33, 0],
    ]
    assert inputs.dtype == np.int32


def test_decoder_inputs_with_another_padding():
    targets = PackedRows(
        tokens=np.array([[5, 2, 6, 2, 9, 9]], np.int32),
        segment_ids=np.array([[1, 1, 2, 2, 0, 0]], np.int32),
        positions=np.array([[0, 1, 0, 1, 0, 0]], np.int32),
    )
    assert decoder_inputs(targets, bos_id=9, pad_id=9).tolist() == [[9, 5, 9, 6, 9, 9]]


def test_plan_takes_the_tightest_row():
    # Rows after three pairs: target spaces 4, 3, 2. The last pair needs 3.
    lengths = np.array([6, 7, 8, 3])
    plan = plan_rows(np.ones(4, np.int64), lengths, 10, 10)
    assert [plan[row].tolist() for row in range(len(plan))] == [[0], [1, 3], [2]]


def test_plan_passes_over_rows_without_source_space():
    sources, targets = np.array([3, 9, 3, 3]), np.array([6, 7, 8, 3])
    plan = plan_rows(sources, targets, 10, 10)
    assert [plan[row].tolist() for row in range(len(plan))] == [[0, 3], [1], [2]]


def test_plan_follows_the_order():
    lengths = np.array([4, 4, 4])
    plan = plan_rows(lengths, lengths, 8, 8, order=np.array([2, 0, 1]))
    assert [plan[row].tolist() for row in range(len(plan))] == [[2, 0], [1]]


def test_plan_refuses_sentences_longer_than_a_row():
    with pytest.raises(ValueError, match="9 tokens does not fit into rows of 8"):
        plan_rows(np.array([1, 9]), np.array([1, 1]), 8, 8)


@hypothesis.given(pair_lengths(), st.integers(0, 3))
def test_plan_places_every_pair_once_and_no_row_overflows(lengths, seed):
    (source_row_length, target_row_length), sources, targets = lengths
    order = np.random.default_rng(seed).permutation(len(sources))
    plan = plan_rows(sources, targets, source_row_length, target_row_length, order)
    assert sorted(plan.pairs) == list(range(len(sources)))
    for row in range(len(plan)):
        assert len(plan[row]) > 0
        assert sources[plan[row]].sum() <= source_row_length
        assert targets[plan[row]].sum() <= target_row_length


@hypothesis.given(pair_lengths(), st.integers(0, 3))
def test_shuffled_plan_fills_its_rows_as_the_plan_did(lengths, seed):
    row_lengths, sources, targets = lengths
    plan = plan_rows(sources, targets, *row_lengths)
    shuffled = shuffle_plan(plan, sources * 100 + targets, np.random.default_rng(seed))
    assert sorted(shuffled.pairs) == list(range(len(sources)))
    np.testing.assert_array_equal(sources[shuffled.pairs], sources[plan.pairs])
    np.testing.assert_array_equal(targets[shuffled.pairs], targets[plan.pairs])
    np.testing.assert_array_equal(shuffled.offsets, plan.offsets)


def test_shuffled_plan_gives_new_neighbours():
    plan = RowPlan(np.arange(100), np.arange(0, 101, 2))
    shuffled = shuffle_plan(plan, np.zeros(100, np.int64), np.random.default_rng(0))
    assert sum(plan.pairs == shuffled.pairs) < 10


def test_plan_wastes_little_on_sentences_of_natural_lengths():
    rng = np.random.default_rng(0)
    targets = np.clip(rng.gamma(8, 2, 20_000).astype(int), 3, 50)
    sources = np.clip(targets + rng.integers(-3, 4, 20_000), 2, 50)
    plan = plan_rows(sources, targets, 64, 64)
    assert targets.sum() / (len(plan) * 64) >= 0.93
