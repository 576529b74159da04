"""Training starts from values with the distribution of the published ones."""

import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict

from flaxformer_mt import interop, presets
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity import references

SIZES = {
    "source_vocab_size": 500,
    "target_vocab_size": 500,
    "d_model": 64,
    "num_heads": 4,
    "d_ff": 256,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
# Trained by other programs (Marian, fairseq) than the published models, whose initial values are
# replaced by those of a checkpoint; double_projection composes two matrices into one.
OTHERS = ("double_projection", "marian", "mbart", "m2m100", "pegasus", "fsmt", "t5gemma")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in presets.FAMILIES if name not in OTHERS])
def test_initial_values_have_the_published_spread(family):
    torch.manual_seed(0)
    reference = references.build(family, **SIZES)
    config, published = interop.load(family, reference.state_dict(), **SIZES)
    tokens = np.ones((2, 5), np.int32)
    ours = flatten_dict(Transformer(config).init(jax.random.key(0), tokens, tokens)["params"])
    theirs = flatten_dict(published)
    assert ours.keys() <= theirs.keys()
    for path, value in ours.items():
        expected = np.asarray(theirs[path])
        # The error of a standard deviation from n values is below its 1/sqrt(n), times three.
        tolerance = 3 / np.sqrt(expected.size)
        np.testing.assert_allclose(value.std(), expected.std(), rtol=tolerance, err_msg=str(path))
        np.testing.assert_allclose(
            value.mean(), expected.mean(), atol=tolerance * 2 * expected.std(), err_msg=str(path)
        )
