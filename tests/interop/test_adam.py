"""Conversion of Adam's state: lossless round trips, and training continues in our optimizer."""

import copy
import re
from typing import Any

import chex
import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from toy_references import ALL, ONE_OF_EACH, VARIANTS, Variant, others_are_slow
from trained_references import assert_identical, train, trained_checkpoint

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert

MIXING = {"double_projection", "annotated_1000_shared"}


def flat(tree: Any) -> dict[str, np.ndarray]:
    return flatten_dict(interop.model_params(tree), sep="/")


@pytest.mark.slow_except("annotated_1000_shared-float64", "fairseq_post_shared-float64")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
@pytest.mark.parametrize("name", others_are_slow())
def test_reference_to_ours_and_back_is_byte_identical(name, dtype, tmp_path):
    variant = ALL[name]
    before = trained_checkpoint(variant, dtype)
    torch.save(before, tmp_path / "before.pt")
    config, params, adam, notes = interop.load_training(
        variant.family, tmp_path / "before.pt", **variant.hints
    )
    assert adam.step == 2
    assert len(notes) == (name in MIXING)
    interop.save(variant.family, config, params, tmp_path / "after.pt", adam)
    after = torch.load(tmp_path / "after.pt", weights_only=True)
    assert_identical(after, before)


@pytest.mark.parametrize(
    "name",
    others_are_slow(ONE_OF_EACH.values(), ["t5_gated", "double_projection", "fairseq_post_shared"]),
)
def test_moments_are_converted_like_their_parameters(name):
    """Moments equal to their parameters stay equal to ours, unless a note reports zeros."""
    variant = ALL[name]
    reference = variant.build()
    state = {
        index: {"step": torch.tensor(1.0), "exp_avg": p.detach(), "exp_avg_sq": p.detach()}
        for index, (name, p) in enumerate(reference.named_parameters())
        if p.requires_grad
    }
    optimizer = torch.optim.Adam(reference.parameters()).state_dict() | {"state": state}
    before = {"model": reference.state_dict(), "optimizer": optimizer}
    _, params, adam, notes = interop.load_training(variant.family, before, **variant.hints)
    # Constants of the reference have no moments.
    constants = {"output/bias"} if interop.FAMILIES[variant.family].constants else set()
    named = re.findall(r"[\w/]+", " ".join(notes))
    expected = {
        path: np.zeros_like(array) if path in constants or path in named else array
        for path, array in flat(params).items()
    }
    chex.assert_trees_all_equal(flat(adam.mean), expected)
    chex.assert_trees_all_equal(flat(adam.variance), expected)


def in_reverse(variant: Variant) -> torch.nn.Module:
    """Returns a reference whose classes define their parts in the reverse order."""
    reference = variant.build()
    for part in reference.modules():
        if not isinstance(part, torch.nn.ModuleList | torch.nn.Sequential):
            parts = dict(part._modules)
            part._modules.clear()
            part._modules.update(reversed(parts.items()))
    return reference


def moments_by_name(variant: Variant, checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the first moments that the module `in_reverse` gets from a checkpoint."""
    key = interop.FAMILIES[variant.family].optimizer_key
    reference = in_reverse(variant)
    optimizer = torch.optim.Adam(reference.parameters())
    reference.load_state_dict(checkpoint["model"], strict=False)
    optimizer.load_state_dict(checkpoint[key])
    return {
        name: optimizer.state[parameter]["exp_avg"]
        for name, parameter in reference.named_parameters()
        if parameter in optimizer.state
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "omitted"),
    [
        ("jadore801120_prj_all", ()),
        ("tunz", ()),
        ("fairseq_post_shared", ()),
        ("fairseq_post_shared", ("version", "_float_tensor")),
    ],
)
def test_moments_stay_with_their_parameters_in_another_order(name, omitted, tmp_path):
    variant = ALL[name]
    reference = in_reverse(variant)
    published = [name for name, _ in variant.build().named_parameters()]
    assert [name for name, _ in reference.named_parameters()] != published
    adam = torch.optim.Adam(reference.parameters())
    for parameter in reference.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    state_dict = reference.state_dict()
    model = {n: each for n, each in state_dict.items() if not n.endswith(omitted or ("-",))}
    assert bool(omitted) == (len(model) < len(state_dict))
    key = interop.FAMILIES[variant.family].optimizer_key
    before = {"model": model, key: adam.state_dict()}
    torch.save(before, tmp_path / "before.pt")
    expected = moments_by_name(variant, before)
    config, params, state, _ = interop.load_training(
        variant.family, tmp_path / "before.pt", **variant.hints
    )
    # Without the carried tensors, those that the file omits are written.
    for written in (params, interop.model_params(params)):
        interop.save(variant.family, config, written, tmp_path / "after.pt", state)
        after = torch.load(tmp_path / "after.pt", weights_only=True)
        chex.assert_trees_all_equal(moments_by_name(variant, after), expected)
        again = interop.load_training(variant.family, tmp_path / "after.pt", **variant.hints)
        assert again.adam is not None
        chex.assert_trees_all_equal(again.adam.mean, state.mean)
    own = tmp_path / "own.safetensors"
    convert(variant.family, OWN, tmp_path / "before.pt", own, variant.hints)
    convert(OWN, variant.family, own, tmp_path / "converted.pt")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    chex.assert_trees_all_equal(moments_by_name(variant, converted), expected)


@pytest.mark.parametrize("names", [None, 3, [], ["a", 1], [["a"]]])
def test_an_order_of_other_parameters_is_ignored(names, tmp_path):
    variant = VARIANTS["tunz"]
    before = trained_checkpoint(variant)
    config, params, adam, _ = interop.load_training("tunz", before, **variant.hints)
    adam = adam._replace(settings={**adam.settings, "parameters": names})
    interop.save("tunz", config, params, tmp_path / "after.pt", adam)
    assert_identical(torch.load(tmp_path / "after.pt", weights_only=True), before)


def test_our_optimizer_continues_from_the_loaded_state():
    """A third Adam step from the loaded state equals the reference's third step."""
    variant = VARIANTS["torch_pre_gelu"]
    reference, adam = train(variant)
    before = {"model": copy.deepcopy(reference.state_dict()), "optimizer": adam.state_dict()}
    _, params, state, _ = interop.load_training("torch", before, **variant.hints)
    gradients = {name: torch.ones_like(p) for name, p in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients[name]
    adam.step()
    _, expected = interop.load("torch", reference.state_dict(), **variant.hints)

    def step(parameter, mean, variance):
        mean, variance = 0.9 * mean + 0.1, 0.999 * variance + 0.001
        unbiased = variance / (1 - 0.999**3)
        return parameter - 0.01 * mean / (1 - 0.9**3) / (np.sqrt(unbiased) + 1e-8)

    ours = jax.tree.map(
        step, *(interop.model_params(tree) for tree in (params, state.mean, state.variance))
    )
    chex.assert_trees_all_close(ours, interop.model_params(expected), rtol=0, atol=1e-6)


def test_an_optimizer_that_has_not_stepped_or_counts_in_integers(tmp_path):
    variant = VARIANTS["tunz"]
    reference = variant.build()
    fresh = torch.optim.Adam(reference.parameters()).state_dict()
    counting = copy.deepcopy(train(variant)[1].state_dict())
    for entry in counting["state"].values():
        entry["step"] = 2
    for optimizer in (fresh, counting):
        before = {"model": reference.state_dict(), "optimizer": optimizer}
        config, params, adam, _ = interop.load_training("tunz", before, **variant.hints)
        interop.save("tunz", config, params, tmp_path / "after.pt", adam)
        after = torch.load(tmp_path / "after.pt", weights_only=True)
        assert_identical(after["optimizer"], optimizer)


def test_groups_of_parameters_need_names(tmp_path):
    variant = VARIANTS["tunz"]
    reference = variant.build()

    def optimizer(named: bool) -> Any:
        parameters = list(reference.named_parameters())
        biases = [(n, p) if named else p for n, p in parameters if n.endswith("bias")]
        others = [(n, p) if named else p for n, p in parameters if not n.endswith("bias")]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
        adam = torch.optim.Adam(groups)
        for parameter in reference.parameters():
            parameter.grad = torch.randn_like(parameter)
        adam.step()
        return {"model": reference.state_dict(), "optimizer": adam.state_dict()}

    before = optimizer(named=True)
    config, params, adam, _ = interop.load_training("tunz", before, **variant.hints)
    interop.save("tunz", config, params, tmp_path / "after.pt", adam)
    after = torch.load(tmp_path / "after.pt", weights_only=True)
    assert_identical(after["optimizer"], before["optimizer"])
    with pytest.raises(UserError, match="several groups without names"):
        interop.load_training("tunz", optimizer(named=False), **variant.hints)


def refusal(before: Any, variant: Variant = VARIANTS["tunz"]) -> str:
    with pytest.raises(UserError) as caught:
        interop.load_training(variant.family, before, **variant.hints)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_invalid_moment_is_rejected_by_name():
    before = trained_checkpoint(VARIANTS["tunz"])
    names = [name for name, _ in VARIANTS["tunz"].build().named_parameters()]
    index = names.index("decoder.layers.1.ffn.layer1.weight")
    name = names[index]

    def changed(**entry: Any) -> dict[str, Any]:
        optimizer = copy.deepcopy(before["optimizer"])
        optimizer["state"][index] |= entry
        return before | {"optimizer": optimizer}

    moment = before["optimizer"]["state"][index]["exp_avg"]
    assert f"exp_avg of {name} has shape (16, 24), but must be (24, 16)" in refusal(
        changed(exp_avg=moment.T)
    )
    assert f"exp_avg_sq of {name} is float64" in refusal(changed(exp_avg_sq=moment.double()))
    assert f"exp_avg of {name} is float16" in refusal(changed(exp_avg=moment.half()))
    assert f"max_exp_avg_sq of {name} is unsupported" in refusal(changed(max_exp_avg_sq=moment))
    assert f"3.0 steps on {name}, but 2.0 on" in refusal(changed(step=torch.tensor(3.0)))
    assert f"step of {name} is not a number" in refusal(changed(step="3"))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        unfit = changed()
        del unfit["optimizer"]["state"][index][key]
        assert f"{key} of {name} is missing" in refusal(unfit)
    unfit = changed()
    del unfit["optimizer"]["state"][index]
    assert f"moments of {name} are missing" in refusal(unfit)
    unfit = changed()
    unfit["optimizer"]["state"][len(names)] = unfit["optimizer"]["state"][index]
    assert f"entry {len(names)} of the optimizer's state is unexpected" in refusal(unfit)


def test_an_optimizer_state_of_another_kind_or_model_is_rejected():
    before = trained_checkpoint(VARIANTS["tunz"])
    other = trained_checkpoint(VARIANTS["torch_post"])["optimizer"]
    assert "the optimizer's parameters are not the model's" in refusal(
        before | {"optimizer": other}
    )
    groups = before["optimizer"]["param_groups"]
    for unfit in (
        {"lr": 1.0},
        {"state": {0: 1.0}, "param_groups": groups},
        {"state": {}, "param_groups": [{"lr": 1.0}]},
        {"state": {}, "param_groups": 3},
    ):
        assert "not that of a torch.optim.Adam" in refusal(before | {"optimizer": unfit})
    momentum = {"state": {0: {"momentum_buffer": 1.0}}, "param_groups": groups}
    assert "Adam's step of" in refusal(before | {"optimizer": momentum})
    assert interop.load_training("tunz", before["model"], num_heads=4).adam is None


@pytest.mark.parametrize("name", sorted(MIXING))
def test_moments_of_combined_parameters_cannot_be_written_after_training(name, tmp_path):
    variant = ALL[name]
    config, params, adam, _ = interop.load_training(
        variant.family, trained_checkpoint(variant), **variant.hints
    )
    later = adam._replace(mean=jax.tree.map(lambda moment: moment + 1, adam.mean))
    with pytest.raises(UserError, match="save without adam"):
        interop.save(variant.family, config, params, tmp_path / "model.pt", later)
    with pytest.raises(UserError, match=r"use \.pt"):
        interop.save(variant.family, config, params, tmp_path / "model.safetensors", adam)
    assert list(tmp_path.iterdir()) == []
