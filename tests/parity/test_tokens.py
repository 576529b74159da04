"""Batches of tokens: rows of padding alone have no target, and rows have one length."""

from typing import Any

import numpy as np
import pytest
import torch
from toy_references import VARIANTS

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.families.tokens import as_tokens
from flaxformer_mt.presets import preset

# The end token is 2.
STARTS = {"start": {"bos_id": 1, "pad_id": 0}, "padding": {"bos_id": 0, "pad_id": 0}}


def outputs(source: Any, target_input: Any, **ids: int) -> list[list[int]]:
    fields: dict[str, Any] = {"source_vocab_size": 9, "target_vocab_size": 9, "eos_id": 2, **ids}
    config = preset("annotated", **fields)
    return as_tokens((source, target_input), config).target_output.tolist()


def test_a_row_of_padding_alone_has_no_target():
    found = outputs([[5, 6, 2], [0, 0, 0]], [[1, 5], [0, 0]], **STARTS["start"])
    assert found == [[5, 2], [0, 0]]


def test_inputs_without_a_start_token_have_no_target():
    found = outputs([[5, 6, 2], [5, 2, 0]], [[1, 5], [0, 0]], **STARTS["start"])
    assert found == [[5, 2], [0, 0]]


def test_a_target_that_starts_with_padding_may_be_empty_if_there_is_a_source():
    source = [[5, 6, 2], [5, 2, 0], [0, 0, 0], [0, 0, 0]]
    target_input = [[0, 5], [0, 0], [0, 0], [0, 5]]
    found = outputs(source, target_input, **STARTS["padding"])
    assert found == [[5, 2], [2, 0], [0, 0], [5, 2]]


def test_targets_may_be_padded_on_the_left():
    assert outputs([[5, 2]], [[0, 1, 5]], **STARTS["start"]) == [[1, 5, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["annotated_1000", pytest.param("jadore801120_prj_all", marks=pytest.mark.slow)],
)
def test_a_batch_may_be_filled_up_with_rows_of_padding(name):
    variant = VARIANTS[name]
    batch = np.array([[5, 6, 2], [0, 0, 0]]), np.array([[1, 5], [0, 0]])
    report = parity.compare(variant.family, variant.build("float64"), batch, **variant.hints)
    assert report.passed, report.first_divergence


@pytest.mark.parametrize(
    "source",
    [
        [[5, 6, 2], [5, 2]],
        [np.array([5, 6, 2]), np.array([5, 2])],
        [torch.tensor([5, 6, 2]), torch.tensor([5, 2])],
        [["a", "b"], ["c", "d"]],
        [[None], [None]],
    ],
)
def test_ragged_rows_and_other_things_are_refused(source):
    for pair in ((source, [[1, 5], [1, 5]]), ([[5, 2], [5, 2]], source)):
        with pytest.raises(UserError, match="integers with rows of one length") as caught:
            outputs(*pair)
        assert "\n" not in str(caught.value)
        assert "pad_id=0" in str(caught.value)


@pytest.mark.parametrize("pair", [([5, 2], [1, 5]), ([[5, 2]], [1, 5]), (5, 1)])
def test_arrays_of_other_ranks_are_refused(pair):
    with pytest.raises(UserError, match=r"must be \[B, S\], \[B, T\]"):
        outputs(*pair)
