"""Every published Transformer equals ours in every value, loss and gradient, on padded batches."""

import warnings

import chex
import numpy as np
import pytest
import torch
from toy_references import ALL, ONE_OF_EACH, VARIANTS, Variant

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import references
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.trace.sites import sites
from flaxformer_mt.presets import FAMILIES, preset

BASE = {"source_vocab_size": 4000, "target_vocab_size": 4000, "d_ff": 2048}
"""The paper's base model; annotated_wide_heads keeps its own width and heads."""


def compare(variant: Variant, dtype: str) -> parity.Report:
    reference = variant.build(dtype)
    config, _ = interop.load(variant.family, reference.state_dict(), **variant.hints)
    side = recipe(variant.family).source_padding
    batch = parity.example(config, source_padding=side)
    report = parity.compare(variant.family, reference, batch, **variant.hints)
    assert not report.untapped
    values = {row.site for row in report.rows} - {"logits", "loss"}
    expected = {site.name for site in sites(config)}
    assert {site for site in values if not site.startswith(("loss/", "gradient/"))} == expected
    trained = {name for name, p in reference.named_parameters() if p.requires_grad}
    assert {row.site for row in report.select("gradient")} == {f"gradient/{n}" for n in trained}
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_value_and_gradient_in_float64(name):
    report = compare(ALL[name], "float64")
    assert report.passed, report
    assert max(row.max_rel for row in report.rows) < 1e-10


# What float32 adds is its rounding, which one family shows.
@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_every_value_and_gradient_in_float32(family):
    report = compare(ALL[ONE_OF_EACH[family]], "float32")
    assert report.passed, report
    assert report.select("logits")[0].max_abs < 2e-5
    assert max(row.max_rel for row in report.select("gradient")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_bare_torch_transformer(batch_first):
    sizes = {"d_model": 16, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
    options = {"dim_feedforward": 24, "batch_first": batch_first, "dtype": torch.float64}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        module = references.perturb(torch.nn.Transformer(**sizes, **options))
    config, _ = interop.load("torch", module.state_dict(), num_heads=4)
    report = parity.compare("torch", module, parity.example(config), num_heads=4)
    assert report.passed, report
    assert not report.untapped


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_at_the_size_of_the_base_model(family, dtype):
    torch.manual_seed(0)
    reference = references.perturb(references.build(family, **BASE, param_dtype=dtype))
    hints = {"num_heads": preset(family).num_heads}
    config, _ = interop.load(family, reference.state_dict(), **hints)
    lengths = {"source_length": 20, "target_length": 18}
    side = recipe(family).source_padding
    for seed in range(10):
        batch = parity.example(config, **lengths, source_padding=side, seed=seed)
        report = parity.compare(family, reference, batch, **hints)
        values = [row for row in report.rows if not row.site.startswith("gradient/")]
        assert all(row.passed for row in values), report
        # A unit whose sign is decided by rounding has a gradient on one side only.
        if not report.kinks:
            break
    assert not report.kinks
    assert report.passed, report
    if dtype == "float32":
        assert report.select("logits")[0].max_abs < 2e-5


@pytest.mark.slow
def test_hidden_units_on_two_sides_of_the_kink_are_counted():
    reference, hints, batch = tunz()
    assert parity.compare("tunz", reference, batch, **hints).kinks == 0
    layer = reference.decoder.layers[0].ffn.layer1
    with torch.no_grad():
        layer.weight[0].zero_()
        layer.bias[0] = 0
    ffn = layer.register_forward_hook(lambda m, a, output: output + 1e-13)
    report = parity.compare("tunz", reference, batch, **hints)
    ffn.remove()
    assert report.kinks == np.sum(batch.target_output != 0)
    assert not any(row.passed for row in report.select("gradient/decoder.layers.0.ffn.layer1.bias"))


def tunz(dtype="float64"):
    """A module of one layer a stack, its hints and a batch."""
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    variant = Variant("tunz", VARIANTS["tunz"].sizes | layers)
    reference = variant.build(dtype)
    config, _ = interop.load("tunz", reference.state_dict(), **variant.hints)
    return reference, variant.hints, parity.example(config)


@pytest.mark.slow
def test_the_module_is_left_as_it_was():
    reference, hints, batch = tunz()
    reference.train()
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    parity.compare("tunz", reference, batch, num_steps=2, **hints)
    assert all(part.training for part in reference.modules())
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in reference.modules())
    chex.assert_trees_all_equal(dict(reference.state_dict()), before)


def test_a_module_may_be_run_and_tapped_in_its_users_way():
    reference, hints, batch = tunz()

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = reference

        def forward(self, pairs):
            return self.inner(pairs["source"], pairs["target"])

        def state_dict(self, *args, **kwargs):
            return self.inner.state_dict(*args, **kwargs)

        def named_parameters(self, *args, **kwargs):
            return self.inner.named_parameters(*args, **kwargs)

    def forward(module, tokens):
        source, target = (torch.tensor(array).long() for array in tokens[:2])
        return module({"source": source, "target": target})

    taps = {
        "encoder/final_norm": "inner.encoder.last_norm",
        "decoder/layers/0/self_attention/weights": parity.softmax_output(
            "inner.decoder.layers.0.self_attention"
        ),
    }
    report = parity.compare("tunz", Wrapped(), batch, taps=taps, forward=forward, **hints)
    assert report.passed, report
    assert [row.site for row in report.rows[:3]] == [*taps, "logits"]


def test_values_may_be_time_major():
    reference, hints, batch = tunz()
    site, module = "encoder/layers/0/feed_forward/output", reference.encoder.layers[0].ffn
    module.time_major = torch.nn.Identity()
    original = module.forward
    module.forward = lambda x: module.time_major(original(x).transpose(0, 1)).transpose(0, 1)
    taps = {site: "encoder.layers.0.ffn.time_major"}
    assert parity.compare("tunz", reference, batch, taps=taps, **hints).passed


@pytest.mark.slow
def test_flattened_logits_will_do_and_others_are_refused():
    reference, hints, batch = tunz()

    def run(module, tokens):
        return module(*(torch.tensor(array).long() for array in tokens[:2]))

    def flattened(module, tokens):
        return run(module, tokens).flatten(0, 1)

    assert parity.compare("tunz", reference, batch, forward=flattened, num_steps=2, **hints).passed
    for forward, message in (
        (lambda *args: (run(*args), None), "returns <class 'tuple'>, not logits"),
        (lambda *args: run(*args)[:, :2], r"returns \(4, 2, 11\), not logits \(4, 6, 11\)"),
        (lambda *args: run(*args).transpose(0, 1), r"returns \(6, 4, 11\), not logits \(4, 6, 1"),
    ):
        with pytest.raises(UserError, match=message):
            parity.compare("tunz", reference, batch, forward=forward, **hints)


MISFITS = [
    ({"encoder/norm": "encoder"}, "there is no site encoder/norm"),
    ({"encoder/final_norm": "encoder.norm"}, "no sub-module 'encoder.norm'"),
    ({"encoder/final_norm": parity.Tap("encoder.last_norm", call=3)}, "there is no call 3"),
    ({"encoder/final_norm": parity.Tap("encoder.layers", op="add")}, "was called 0 times"),
    ({"encoder/final_norm": parity.Tap("encoder.last_norm", argument=4)}, "is not a tensor"),
    ({"encoder/final_norm": "encoder.layers.0.ffn.layer1"}, "has shape"),
]


def test_a_tap_that_does_not_fit_is_named():
    reference, hints, batch = tunz()
    for taps, message in MISFITS:
        with pytest.raises(UserError, match=message) as caught:
            parity.compare("tunz", reference, batch, taps=taps, **hints)
        assert "encoder/" in str(caught.value)
    with pytest.raises(UserError, match="unknown family 'tuns'"):
        parity.compare("tuns", reference, batch, **hints)
    for batches, steps in (([batch], 0), ([batch], -1), ([], 2)):
        with pytest.raises(UserError, match=f"num_steps={steps} of {len(batches)} batches"):
            parity.trajectory("tunz", reference, batches, steps, **hints)


def test_taps_that_do_not_fit_are_reported_if_nobody_gave_them():
    reference, hints, batch = tunz()
    del reference.i_emb_dropout
    reference.i_emb_dropout = lambda x: x  # A fork that has no such module.
    report = parity.compare("tunz", reference, batch, **hints)
    assert report.untapped == ("source/embedded",)
    assert report.passed


def test_nan_is_a_difference():
    reference, hints, batch = tunz()
    norm = reference.decoder.last_norm
    original = norm.forward
    norm.forward = lambda x: original(x) * float("nan")
    report = parity.compare("tunz", reference, batch, **hints)
    assert report.first_divergence.site == "decoder/final_norm"
    assert report.first_divergence.max_abs == np.inf


@pytest.mark.slow
def test_a_frozen_module_is_refused():
    reference, hints, batch = tunz()
    with pytest.raises(UserError, match=r"frozen: call module\.requires_grad_\(\)"):
        parity.compare("tunz", reference.requires_grad_(False), batch, **hints)
