"""Our model equals every published Transformer in logits.

The parity tool is not used here; `test_compare.py` uses it to compare all values, and float64.

Compared are the rows of real target tokens. Where a row is padding its values mean nothing and may
differ: in a sentence padded on the left such a row may attend to nothing at all, which gives zeros
here and the mean of all values in the published code (which writes -1e9 over every score).
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pytest
import torch
from toy_references import VARIANTS, Variant

from flaxformer_mt import interop
from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.formats.hub_families import HUB_FAMILIES
from flaxformer_mt.model.transformer import Transformer

SOURCE = np.array([[5, 3, 8, 2, 0, 0], [4, 7, 2, 0, 0, 0], [9, 3, 10, 6, 5, 2], [8, 2, 0, 0, 0, 0]])
TARGET = np.array([[1, 4, 9, 3, 7], [1, 6, 2, 0, 0], [1, 3, 0, 0, 0], [1, 10, 5, 2, 0]])
LEFT_PADDED_TARGET = np.array([[0, 0, 1, 9, 4]])


class Batch(NamedTuple):
    """The inputs of both sides."""

    source: np.ndarray
    """[B, S]"""
    target: np.ndarray
    """[B, T], the decoder's input."""
    source_positions: np.ndarray
    """[B, S], each token's position in its sentence."""
    real: np.ndarray
    """bool [B, T], False = padding of the target."""


def batch_of(variant: Variant, config: TransformerConfig) -> Batch:
    """Sentences with the family's special tokens and padding."""
    source, target = SOURCE, TARGET
    # Marian starts with padding; fairseq and PyTorch hide scores with -inf, so that a row which
    # sees nothing is NaN; and tunz' start stands in the first column.
    masking = {*HUB_FAMILIES, "fairseq", "torch", "tunz"}
    if variant.family not in masking:
        target = np.concatenate([TARGET[:-1], LEFT_PADDED_TARGET])
    if variant.family == "fairseq":
        source = np.stack([np.roll(row, np.sum(row == 0)) for row in source])
    special = [config.pad_id, config.bos_id, config.eos_id]
    words = [token for token in range(config.target_vocab_size) if token not in special]
    numbers = np.array(special + words)
    positions = np.maximum(np.cumsum(source != 0, axis=1) - 1, 0)
    return Batch(numbers[source], numbers[target], np.int32(positions), target != 0)


@functools.cache
def compiled(config: TransformerConfig) -> Any:
    """A function of (params, source, target, positions) to logits."""

    def run(params, source, target, source_positions):
        return Transformer(config).apply(
            {"params": params},
            source if config.has_inputs else None,
            target,
            encoder_positions=source_positions if config.has_inputs else None,
        )

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


# By default, `test_promises.py` compares every value of a variant of each family, with few layers.
@pytest.mark.slow_except("tunz")
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_reference(name):
    variant = VARIANTS[name]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target, positions, real = batch_of(variant, config)
    with torch.no_grad():
        expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
    ours = compiled(config)(
        interop.model_params(params), np.int32(source), np.int32(target), positions
    )
    chex.assert_trees_all_equal_dtypes(ours, expected)
    real = real[:, :, None]
    chex.assert_trees_all_close(np.asarray(ours) * real, expected * real, rtol=0, atol=2e-5)


def test_double_projection_joins_heads_in_its_own_way_only_on_request():
    correct, published = (
        Variant("double_projection", {"published_head_join": join}).build().encoder[0]
        for join in (False, True)
    )
    x, mask = torch.randn(3, 5, 16), torch.ones(1, 5, 5, dtype=torch.bool)
    with torch.no_grad():
        assert not torch.allclose(correct(x, mask), published(x, mask), atol=1e-2)
    one_head = [
        Variant("double_projection", {"published_head_join": join, "num_heads": 1})
        .build()
        .encoder[0]
        for join in (False, True)
    ]
    with torch.no_grad():
        assert torch.equal(one_head[0](x, mask), one_head[1](x, mask))


@pytest.mark.slow
def test_a_source_of_padding_alone_disturbs_no_other_sentence():
    variant = VARIANTS["jadore801120_prj_all"]
    reference = variant.build()
    config, params = interop.load(variant.family, reference.state_dict(), **variant.hints)
    source, target, positions, real = batch_of(variant, config)
    source = np.where(np.arange(4)[:, None] == 1, 0, source)
    with torch.no_grad():
        expected = reference(torch.tensor(source), torch.tensor(target)).numpy()
    logits = compiled(config)(
        interop.model_params(params), np.int32(source), np.int32(target), positions
    )
    chex.assert_tree_all_finite(logits)
    others = real & (np.arange(4) != 1)[:, None]
    chex.assert_trees_all_close(np.asarray(logits)[others], expected[others], rtol=0, atol=2e-5)
