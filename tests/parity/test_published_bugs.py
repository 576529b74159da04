"""Published behavior that a comparison of real tokens does not show, and what our model does.

Bugs that change a value of a real token are among the mutations of `test_mutations.py`.
"""

import numpy as np
import pytest
import torch
from torch import nn

from flaxformer_mt import interop
from flaxformer_mt.model.transformer import Transformer
from flaxformer_mt.parity import references


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
