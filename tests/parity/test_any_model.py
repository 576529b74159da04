"""A PyTorch module and any JAX function of the same weights are compared value by value."""

import jax
import numpy as np
import optax
import pytest
import torch
from any_models import CLASSIFIER
from module_changes import with_forward, with_values

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import same, transposed


def test_values_and_gradients_agree():
    report = CLASSIFIER.compare()
    assert report.passed, report
    assert not report.untapped
    assert len(report.select("layers")) == 3 * 12
    assert len(report.select("gradient")) == len(dict(CLASSIFIER.module().named_parameters()))


def test_the_first_difference_is_found():
    report = CLASSIFIER.compare(with_values("layers.1.norm_2", eps=1e-3))
    assert report.first_divergence.site == "layers/1/layer"


def test_a_detached_norm_is_located():
    def detached(self, x):
        mean = x.mean(-1, keepdim=True).detach()
        deviation = (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt().detach()
        return (x - mean) / deviation * self.weight + self.bias

    report = CLASSIFIER.compare(with_forward("layers.1.norm_1", detached))
    assert report.first_divergence.section == "gradients"
    (note,) = report.notes
    assert "agree down to layers/1/norm_1" in note
    assert "differ at layers/1/sum" in note


def project(params, x):
    return parity.tap("hidden", x @ params["kernel"])


def compare_projection(**options):
    module = torch.nn.Linear(3, 2, bias=False)
    params = {"kernel": np.ones((3, 2), np.float32)}
    batch = np.arange(6.0).reshape(2, 3)
    defaults = {"names": {"hidden": ""}, "weights": [transposed("kernel", "weight")]}
    return parity.compare_models(module, project, params, batch, **(defaults | options))


@pytest.mark.parametrize("weights_of", ["module", "function"])
def test_both_sides_have_the_weights_of_either(weights_of):
    assert compare_projection(weights_of=weights_of).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": []}, "parameter kernel is in no rule"),
        ({"weights": None}, "names kernel, which the module does not have"),
        ({"weights": [same("kernel", "weight")]}, r"gives \(2, 3\), but the parameter is \(3, 2\)"),
        ({"weights": [transposed("kernel", "weight")] * 2}, "parameter kernel is in 2 rules"),
        ({"weights": [transposed("matrix", "weight")]}, "parameter kernel is in no rule"),
        ({"names": {"hidden": "linear"}}, "no sub-module 'linear'"),
        ({"names": {"h": ""}}, "there is no site h"),
        ({"forward": lambda module, x: module(x)[:, :1]}, "returns .*, but the function"),
        ({"intermediates": True}, r"must return \(outputs, intermediates\)"),
    ],
)
def test_what_cannot_be_compared_is_said(options, message):
    with pytest.raises(UserError, match=message):
        compare_projection(**options)


@pytest.mark.parametrize(("epsilon", "passed"), [(1e-8, True), (1e-3, False)])
def test_optimizer_steps(epsilon, passed):
    module = CLASSIFIER.module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with jax.numpy_dtype_promotion("standard"):  # Adam's counts are integers.
        report = parity.compare_models(
            module,
            CLASSIFIER.function,
            CLASSIFIER.params,
            CLASSIFIER.batch,
            names=CLASSIFIER.names,
            weights=CLASSIFIER.weights,
            num_steps=3,
            optimizers=(
                lambda parameters: torch.optim.Adam(parameters, 1e-3, eps=epsilon),
                optax.adam(1e-3, eps=1e-8),
            ),
        )
    assert report.passed == passed
    assert (report.trajectory.first_divergence is None) == passed
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
