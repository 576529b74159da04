"""Checkpoints of wrapped modules, whose names all begin with a prefix, and modules that are."""

import re

import chex
import numpy as np
import pytest
import torch
from toy_references import ALL, VARIANTS, others_are_slow

from flaxformer_mt import interop, parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps import checkpoints

# DataParallel; torch.compile; Lightning; both of the first; Lightning around Hugging Face's names.
PREFIXES = ("module.", "_orig_mod.", "model.", "module._orig_mod.", "model.model.")


@pytest.mark.parametrize("name", others_are_slow(quick=["t5", "double_projection"]))
def test_a_prefix_of_all_names_is_removed(name):
    variant = ALL[name]
    state = variant.build().state_dict()
    config, params = interop.load(variant.family, state, **variant.hints)
    for prefix in PREFIXES:
        wrapped = {prefix + name: tensor for name, tensor in state.items()}
        found = interop.load(variant.family, wrapped, **variant.hints)
        assert found[0] == config
        chex.assert_trees_all_equal(found[1], params)


def test_names_that_begin_with_a_prefix_by_themselves_keep_it():
    variant = VARIANTS["marian_all"]
    state = variant.build().state_dict()
    config, _ = interop.load("marian", state, **variant.hints)
    tied = interop.FAMILIES["marian"].omitted(config) - {"model.shared.weight"}
    inside = {
        name: tensor for name, tensor in state.items() if name not in {"final_logits_bias", *tied}
    }
    assert all(name.startswith("model.") for name in inside)
    loaded = interop.load("marian", inside, **variant.hints)
    assert checkpoints.to_state_dict(interop.FAMILIES["marian"], *loaded).keys() == inside.keys()


@pytest.mark.parametrize("prefix", ["wrapper.", "module", "modules."])
def test_other_prefixes_are_no_wrappers(prefix):
    variant = VARIANTS["tunz"]
    state = {prefix + name: tensor for name, tensor in variant.build().state_dict().items()}
    with pytest.raises(UserError, match=r"tensor [a-z_.]*weight is missing"):
        interop.load("tunz", state, **variant.hints)


def test_a_prefix_of_some_names_is_no_wrapper():
    variant = VARIANTS["tunz"]
    state = {f"module.{name}": tensor for name, tensor in variant.build().state_dict().items()}
    with pytest.raises(UserError, match=r"tensor [a-z_.]*weight is missing"):
        interop.load("tunz", state | {"steps": torch.zeros(1)}, **variant.hints)


def test_a_tensor_that_a_wrapped_module_lacks_is_named():
    variant = VARIANTS["tunz"]
    state = {f"module.{name}": tensor for name, tensor in variant.build().state_dict().items()}
    del state["module.encoder.last_norm.bias"]
    with pytest.raises(UserError, match=r"tensor encoder\.last_norm\.bias is missing"):
        interop.load("tunz", state, **variant.hints)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_optimizer_of_a_wrapped_module_is_converted(is_named, tmp_path):
    variant = VARIANTS["tunz"]
    wrapped = torch.nn.DataParallel(variant.build())
    parameters = wrapped.named_parameters() if is_named else wrapped.parameters()
    adam = torch.optim.Adam(parameters)
    for parameter in wrapped.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    before = {"model": wrapped.state_dict(), "optimizer": adam.state_dict()}
    torch.save(before, tmp_path / "before.pt")
    config, params, state, _ = interop.load_training(
        "tunz", tmp_path / "before.pt", **variant.hints
    )
    interop.save("tunz", config, params, tmp_path / "after.pt", state)
    after = torch.load(tmp_path / "after.pt", weights_only=True)
    # The names are written without the prefix.
    inside = variant.build()
    parameters = inside.named_parameters() if is_named else inside.parameters()
    continued = torch.optim.Adam(parameters)
    inside.load_state_dict(after["model"])
    continued.load_state_dict(after["optimizer"])
    names = [name for name, _ in inside.named_parameters()]
    for group in after["optimizer"]["param_groups"]:
        assert group.get("param_names", names) == names
    expected = [adam.state[parameter]["exp_avg"] for parameter in wrapped.parameters()]
    found = [continued.state[parameter]["exp_avg"] for parameter in inside.parameters()]
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrapped_module_is_not_compared(prefix):
    variant = VARIANTS["jadore801120_prj_all"]
    module = variant.build()
    for name in reversed(prefix.split(".")[:-1]):
        module = torch.nn.ModuleDict({name: module})
    tokens = np.array([[5, 6, 2]])
    message = (
        f"begin with '{prefix}', which a wrapper adds: give the module inside, module.{prefix}"
    )
    with pytest.raises(UserError, match=re.escape(message[:-1])):
        parity.compare("jadore801120", module, (tokens, tokens), **variant.hints)
