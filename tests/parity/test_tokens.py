"""Batches of tokens: rows of padding alone have no target, and rows have one length."""

import dataclasses
from typing import Any

import chex
import numpy as np
import pytest
import torch
from toy_references import VARIANTS

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.families.tokens import as_tokens, padding
from flaxformer_mt.presets import preset

PACKED = {
    "encoder_input_tokens": np.ones((1, 4)),
    "decoder_input_tokens": np.ones((1, 4)),
    "decoder_segment_ids": np.array([[1, 1, 2, 2]]),
}
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
@pytest.mark.parametrize("name", ["annotated_1000", "jadore801120_prj_all"])
def test_a_batch_may_be_filled_up_with_rows_of_padding(name):
    variant = VARIANTS[name]
    batch = np.array([[5, 6, 2], [0, 0, 0]]), np.array([[1, 5], [0, 0]])
    report = parity.compare(variant.family, variant.build("float64"), batch, **variant.hints)
    assert report.passed, report.first_divergence


REFUSED = [
    ((np.zeros((2, 3)),), "a batch must have encoder_input_tokens"),
    ((np.zeros((2, 3)), np.zeros((3, 3)), np.zeros((3, 3))), r"not \(2, 3\), \(3, 3\)"),
    ((np.full((2, 3), 2.7), np.ones((2, 3))), "the tokens of a batch must be integers"),
    ((np.full((2, 3), 99), np.ones((2, 3))), "source has tokens from 99 to 99, but the voc"),
    ((np.ones((2, 3)), np.full((2, 3), -9)), "target_input has tokens from -9 to -9, but"),
    (PACKED, "one sentence pair per row"),
    *(
        (pair, "integers with rows of one length: .* pad_id=0")
        for rows in (
            [[5, 6, 2], [5, 2]],
            [torch.tensor([5, 6, 2]), torch.tensor([5, 2])],
            [["a", "b"], ["c", "d"]],
            [[None], [None]],
        )
        for pair in ((rows, [[1, 5], [1, 5]]), ([[5, 2], [5, 2]], rows))
    ),
    *(
        (pair, r"must be \[B, S\], \[B, T\]")
        for pair in (([5, 2], [1, 5]), ([[5, 2]], [1, 5]), (5, 1))
    ),
]


def test_a_batch_of_another_form_is_refused():
    config = preset("annotated", source_vocab_size=9, target_vocab_size=9)
    for batch, message in REFUSED:
        with pytest.raises(UserError, match=message) as caught:
            as_tokens(batch, config)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no target token"):
        padding(as_tokens((np.zeros((2, 3)),) * 2, config), config.pad_id)


def test_batches_are_taken_in_every_usual_form():
    config = preset("annotated", source_vocab_size=9, target_vocab_size=9, d_model=8)
    source = np.array([[4, 5, 2], [6, 2, 0]])
    target_input = np.array([[1, 7, 8, 3], [1, 7, 0, 0]])
    target_output = np.array([[7, 8, 3, 2], [7, 2, 0, 0]])
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    mapping = dict(zip(names, (source, target_input, target_output), strict=True))
    batch = dataclasses.make_dataclass("Batch", names)(*mapping.values())
    for form in (
        mapping,
        batch,
        (source, target_input),
        (torch.tensor(source), target_input, target_output),
    ):
        tokens = as_tokens(form, config)
        chex.assert_trees_all_equal(tuple(tokens), (source, target_input, target_output))


def test_examples_may_be_short_but_need_ordinary_tokens():
    config = preset("tunz", source_vocab_size=9, target_vocab_size=9, d_model=8)
    for length in (1, 2, 3):
        tokens = parity.example(config, source_length=length, target_length=length)
        assert tokens.source.shape == tokens.target_input.shape == (4, length)
        assert (tokens.target_output == config.eos_id).sum() == 4
    sizes = {"source_vocab_size": 3, "target_vocab_size": 3}
    small = dataclasses.replace(config, **sizes, pad_id=0, eos_id=1, bos_id=2)
    with pytest.raises(UserError, match="a vocabulary of 3 tokens has only special ones"):
        parity.example(small)


def test_examples_are_padded_and_repeatable():
    config = preset("tunz", source_vocab_size=9, target_vocab_size=9, d_model=8)
    for side in ("left", "right"):
        tokens = parity.example(config, source_padding=side, seed=3)
        again = parity.example(config, source_padding=side, seed=3)
        chex.assert_trees_all_equal(tokens, again)
        padded = tokens.source == config.pad_id
        assert padded[1:, 0 if side == "left" else -1].all()
        assert not padded[0].any()
        assert (tokens.target_input[:, 0] == config.bos_id).all()
