"""Length buckets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.decoding.batching.length_buckets import Bucket, fill_rows, plan_buckets
from flaxformer_mt.errors import UserError

ANY_LENGTH = TransformerConfig()
UP_TO_100 = TransformerConfig(position_kind="learned", max_length=100)


def test_a_plan_by_hand():
    assert plan_buckets([3, 40, 0, 16, 17, 5, 33], 32, ANY_LENGTH) == [
        Bucket(length=64, num_rows=1, indices=[1]),
        Bucket(length=64, num_rows=1, indices=[6]),
        Bucket(length=32, num_rows=1, indices=[4]),
        Bucket(length=16, num_rows=2, indices=[3, 5]),
        Bucket(length=16, num_rows=2, indices=[0]),
    ]


@given(st.lists(st.integers(0, 300)), st.integers(1, 500))
def test_the_shape_is_a_function_of_the_length_alone(lengths, tokens):
    buckets = plan_buckets(lengths, tokens, ANY_LENGTH)
    indices = sorted(index for bucket in buckets for index in bucket.indices)
    assert indices == [index for index, length in enumerate(lengths) if length]
    for bucket in buckets:
        assert 0 < len(bucket.indices) <= bucket.num_rows == max(1, tokens // bucket.length)
        for index in bucket.indices:
            (alone,) = plan_buckets([lengths[index]], tokens, ANY_LENGTH)
            assert (alone.length, alone.num_rows) == (bucket.length, bucket.num_rows)
            assert lengths[index] <= bucket.length < max(17, 2 * lengths[index])


def test_rows_are_no_longer_than_a_learned_position_table():
    assert [bucket.length for bucket in plan_buckets([100, 64], 64, UP_TO_100)] == [100, 64]
    with pytest.raises(UserError, match=r"sentence 2 has 101 tokens.*model.max_length=100"):
        plan_buckets([100, 101], 64, UP_TO_100)


def test_rows_are_filled_with_padding():
    rows = fill_rows([[7], [8, 9], [5, 6, 7]], Bucket(length=4, num_rows=3, indices=[2, 0]), 1)
    np.testing.assert_array_equal(rows, [[5, 6, 7, 1], [7, 1, 1, 1], [1, 1, 1, 1]])
    assert rows.dtype == np.int32
