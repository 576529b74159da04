"""What the publications do beside the mathematics, and why a comparison does not see it.

Bugs that change a value of a real token are among the mutations of `test_mutations.py`.
"""

import pytest
import torch
from torch import nn


def test_pytorch_s_fast_path_differs_at_padding_alone():
    """Its encoder packs real tokens together in evaluation, and gives zeros for the others."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    slow, fast = (nn.TransformerEncoder(layer, 2, enable_nested_tensor=n) for n in (False, True))
    fast.load_state_dict(slow.state_dict())
    x, padding = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    with torch.no_grad():
        expected = slow.train(False)(x, src_key_padding_mask=padding)
        with pytest.warns(UserWarning, match="nested tensors"):
            found = fast.train(False)(x, src_key_padding_mask=padding)
    assert torch.allclose(found[~padding], expected[~padding], atol=1e-5)
    assert not found[padding].any()
    assert expected[padding].all()


def test_the_initialiser_of_annotated_wide_heads_has_an_old_name_for_the_same():
    """`xavier_uniform` without an underscore: it warns, and changes the matrix in place."""
    old, new = torch.zeros(3, 4), torch.zeros(3, 4)
    torch.manual_seed(0)
    with pytest.warns(FutureWarning, match="xavier_uniform_"):
        nn.init.xavier_uniform(old)
    torch.manual_seed(0)
    nn.init.xavier_uniform_(new)
    assert torch.equal(old, new)
