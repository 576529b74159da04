"""Grouped queries: a whole model equals a PyTorch reference with repeated key/value heads."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from toy_references import GROUPED_QUERIES, others_are_slow

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.references.common import join_heads, split_heads


@pytest.mark.slow
@pytest.mark.parametrize("groups", others_are_slow([1, 2], [2]))
@pytest.mark.parametrize("kind", others_are_slow(["sinusoidal", "rotary", "alibi"], ["rotary"]))
def test_every_value_loss_and_gradient(kind, groups):
    fields = {"num_kv_heads": groups, "position_kind": kind}
    variant = dataclasses.replace(
        GROUPED_QUERIES,
        sizes=GROUPED_QUERIES.sizes | fields,
        overrides=fields if kind != "sinusoidal" else {"num_kv_heads": groups},
    )
    reference, family = variant.build("float64"), variant.weight_map
    config, _ = interop.load(family, reference.state_dict(), **variant.hints)
    report = parity.compare(family, reference, parity.example(config), **variant.hints)
    assert report.passed, report
    assert not report.untapped
    assert max(row.max_rel for row in report.rows) < 1e-10
    assert {"logits", "loss", "decoder/layers/1/cross_attention/key"} <= {
        row.site for row in report.rows
    }
    names = [name for name, _ in reference.named_parameters()]
    assert [row.site for row in report.select("gradient")] == [f"gradient/{n}" for n in names]
    key = reference.decoder.transformer_layers[1].context_attn.linear_keys
    assert key.weight.shape == (groups * 4, 16)


def test_the_attention_of_the_reference_is_that_of_pytorch():
    attention = GROUPED_QUERIES.build("float64").encoder.transformer[0].self_attn
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    visible = torch.rand(2, 5, 5) < 0.5
    visible |= torch.eye(5, dtype=torch.bool)
    query, key, value = (
        split_heads(linear(x), heads)
        for linear, heads in (
            (attention.linear_query, 4),
            (attention.linear_keys, 2),
            (attention.linear_values, 2),
        )
    )
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None], enable_gqa=True
    )
    expected = attention.final_linear(join_heads(context))
    torch.testing.assert_close(attention(x, x, visible)[0], expected, rtol=0, atol=1e-14)


def test_the_published_family_is_refused_with_it():
    state = GROUPED_QUERIES.build().state_dict()
    with pytest.raises(UserError, match="num_kv_heads=0, not 2"):
        interop.load("opennmt", state, **GROUPED_QUERIES.hints)
