"""Modules that compute a published function by other code: the taps of the family may not fit."""

import types

import numpy as np
import pytest
import torch
from torch.nn import functional
from toy_references import ALL, ONE_OF_EACH

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.families import published as published_files
from flaxformer_mt.parity.references import double_projection, jadore801120


def published(family, name=None):
    """A reference, what its tensors do not determine, and a batch."""
    variant = ALL[name or ONE_OF_EACH[family]]
    reference = variant.build("float64")
    config, _ = interop.load(family, reference.state_dict(), **variant.hints)
    return reference, variant.hints, parity.example(config)


def with_forward(reference, kind, forward):
    """Replaces the forward of all sub-modules of a class."""
    for module in reference.modules():
        if isinstance(module, kind):
            module.forward = types.MethodType(forward, module)
    return reference


def fused_attention(self, q, k, v, mask):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), None


def scores_by_key(self, q, k, v, mask):
    scores = torch.einsum("bhtk,bhsk->btsh", q / self.temperature, k)
    weights = scores.masked_fill(~mask.permute(0, 2, 3, 1), -1e9).softmax(dim=2)
    return torch.einsum("btsh,bhsu->bhtu", weights, v), weights


def projected_together(self, x, memory, mask):
    projections = (self.w_qs, self.w_ks, self.w_vs)
    joint = torch.cat([each.weight for each in projections])
    queries, of_memory = functional.linear(x, joint), functional.linear(memory, joint)
    sizes = [len(each.weight) for each in projections]
    parts = (queries.split(sizes, -1)[0], *of_memory.split(sizes, -1)[1:])
    q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
    context, weights = self.attention(q, k, v, mask.unsqueeze(1))
    return self.layer_norm(x + self.fc(context.transpose(1, 2).flatten(2))), weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "forward", "missing"),
    [
        (jadore801120.ScaledDotProductAttention, fused_attention, ""),
        (jadore801120.ScaledDotProductAttention, scores_by_key, "self_attention/scores"),
        (jadore801120.MultiHeadAttention, projected_together, "self_attention/query"),
    ],
)
def test_equal_modules_agree_and_what_is_elsewhere_is_noted(kind, forward, missing):
    reference, hints, batch = published("jadore801120")
    report = parity.compare("jadore801120", with_forward(reference, kind, forward), batch, **hints)
    assert report.passed, report
    noted = [note for note in report.notes if "where the published code" in note]
    assert [missing in note for note in noted] == [True] * bool(missing)


@pytest.mark.slow
def test_a_difference_is_found_although_some_values_are_elsewhere():
    def wrong(self, x, memory, mask):
        outputs, weights = projected_together(self, x, memory, mask)
        return outputs * 1.001, weights

    reference, hints, batch = published("jadore801120")
    module = with_forward(reference, jadore801120.MultiHeadAttention, wrong)
    assert not parity.compare("jadore801120", module, batch, **hints).passed


@pytest.mark.slow
@pytest.mark.parametrize("joined_as_published", [False, True])
def test_heads_may_be_computed_one_after_another(joined_as_published):
    def by_head(self, q, k, v, mask=None):
        heads = [
            self.attention(*parts, mask)[0]
            for parts in zip(
                *(
                    part(x).chunk(self.num_heads, -1)
                    for part, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v))
                ),
                strict=True,
            )
        ]
        joined = torch.cat(heads, dim=0 if joined_as_published else -1).view(*q.shape)
        return self.W_o(joined), None

    reference, hints, batch = published("double_projection")
    module = with_forward(reference, double_projection.MultiHeadAttention, by_head)
    report = parity.compare("double_projection", module, batch, **hints)
    assert not report.untapped
    assert report.passed != joined_as_published
    if joined_as_published:
        assert report.diagnosis.cause == "head order"


@pytest.mark.slow
def test_masks_may_be_left_out_without_padding():
    reference, hints, _ = published("torch")

    def unmasked(module, tokens):
        source, target = (torch.tensor(np.array(array)).long().T for array in tokens[:2])
        x, y = (
            module.positional_encoding(table(side))
            for table, side in ((module.src_tok_emb, source), (module.tgt_tok_emb, target))
        )
        future = torch.ones(len(target), len(target)).triu(1).bool()
        return module.generator(module.transformer(x, y, tgt_mask=future).transpose(0, 1))

    batch = np.array([[5, 6, 7, 3, 2], [9, 4, 3, 6, 2]]), np.array([[1, 5, 6, 7], [1, 7, 4, 9]])
    report = parity.compare("torch", reference, batch, forward=unmasked, **hints)
    assert report.passed, report
    assert not report.untapped


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fairseq", "torch"])
def test_as_many_sentences_as_tokens(family):
    reference, hints, _ = published(family)
    pad = hints.get("pad_id", 0)
    batch = np.array([[5, 6, 2], [4, 2, pad], [2, pad, pad]]), np.array([[2, 5, 6]] * 3)
    if family == "fairseq":  # Padding is on the left of the source.
        batch = np.array([[5, 6, 2], [pad, 4, 2], [pad, pad, 2]]), batch[1]
    report = parity.compare(family, reference, batch, **hints)
    assert report.passed, report


@pytest.mark.slow
def test_an_attribute_may_have_the_name_of_another_familys_setting():
    reference, hints, batch = published("annotated")
    reference.head_size = 4 * hints["num_heads"]  # The width of a head; in tunz, their number.
    assert parity.compare("annotated", reference, batch, **hints).passed


@pytest.mark.slow
def test_active_dropout_is_noted():
    reference, hints, batch = published("tunz")
    original = reference.encoder.layers[0].ffn.forward
    reference.encoder.layers[0].ffn.forward = lambda x: functional.dropout(original(x), 0.5)
    report = parity.compare("tunz", reference, batch, **hints)
    assert not report.passed
    assert any("differ between two runs on the same batch" in note for note in report.notes)


@pytest.mark.slow
def test_frozen_parameters_are_noted():
    reference, hints, batch = published("annotated")
    reference.encoder.layers[0].self_attn.requires_grad_(False)
    report = parity.compare("annotated", reference, batch, **hints)
    assert report.passed
    (note,) = report.notes
    assert note.startswith("Not compared: the gradients of 8 frozen parameters (requires_grad=")


def test_what_cannot_be_compared_is_named():
    reference, hints, batch = published("annotated")
    with pytest.raises(UserError, match=r"begin with 'module\.', .* give the module inside"):
        parity.compare("annotated", torch.nn.DataParallel(reference), batch, **hints)
    layers = reference.encoder.layers
    layers[1] = layers[0]
    first = r"encoder\.layers\.0\.self_attn\.linears\.0\.weight"
    with pytest.raises(UserError, match=rf"{first} and encoder\.layers\.1\..* are one tensor"):
        parity.compare("annotated", reference, batch, **hints)


def test_the_checkpoint_of_a_wrapped_module_is_read(tmp_path):
    reference, *_ = published("annotated")
    wrapped = {f"module.{name}": tensor for name, tensor in reference.state_dict().items()}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    model = published_files.read("annotated", tmp_path / "wrapped.pt")
    assert model.tensors.keys() == reference.state_dict().keys()
