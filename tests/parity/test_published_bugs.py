"""Published behavior that a comparison of real tokens does not show, and what our model does.

Bugs that change a value of a real token are among the mutations of `test_mutations.py`.
"""

import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity import references
from flaxformer_mt.presets import preset


def test_pytorch_s_fast_path_equals_ours_except_at_padding():
    """In evaluation, its encoder packs real tokens; the others are zeros after the layers."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 1}
    module = nn.Transformer(**sizes, dim_feedforward=24, batch_first=True)
    references.perturb(module).eval()
    x, real = torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    with torch.no_grad(), pytest.warns(UserWarning, match="nested tensors"):
        fast = module.encoder(x, src_key_padding_mask=~real).numpy()
    config, params = interop.load("torch", module.state_dict(), num_heads=4)
    ours, _ = Transformer(config).apply(
        {"params": params},
        x.numpy(),
        real.numpy()[:, None, None],
        method=lambda model, *inputs: model.encoder(*inputs),
    )
    ours, real = np.asarray(ours), real.numpy()
    np.testing.assert_allclose(ours[real], fast[real], rtol=0, atol=1e-5)
    of_zeros = module.encoder.norm.bias.detach().numpy()
    np.testing.assert_allclose(fast[~real], [of_zeros] * 2, rtol=0, atol=1e-7)
    assert np.abs(ours[~real] - of_zeros).max() > 0.1


def assert_xavier_uniform(matrix: np.ndarray) -> None:
    """Uniform between -b and b with b = sqrt(6 / (fan_in + fan_out))."""
    bound = np.sqrt(6 / sum(matrix.shape))
    quantiles = np.linspace(0, 1, 21)
    found = np.quantile(matrix, quantiles) / bound
    assert np.abs(matrix).max() <= bound
    np.testing.assert_allclose(found, 2 * quantiles - 1, atol=0.05)


@pytest.mark.slow
def test_the_deprecated_initializer_of_annotated_wide_heads_is_ours():
    """The published `xavier_uniform`, without underscore, is an old name of `xavier_uniform_`."""
    published = torch.zeros(80, 120)
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="xavier_uniform_"):
        nn.init.xavier_uniform(published)
    assert_xavier_uniform(published.numpy())
    config = preset(
        "annotated_wide_heads",
        source_vocab_size=90,
        target_vocab_size=90,
        d_model=80,
        head_dim=20,
        d_ff=120,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    tokens = np.ones((1, 2), np.int32)
    variables = jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens)
    initial = flatten_dict(variables["params"], sep="/")
    matrices = {
        name: np.squeeze(leaf) for name, leaf in initial.items() if np.squeeze(leaf).ndim == 2
    }
    assert len(matrices) > 15
    for matrix in matrices.values():
        assert_xavier_uniform(matrix)
