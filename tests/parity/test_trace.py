"""The values that taps capture in a PyTorch module."""

import numpy as np
import pytest
import torch
from torch import nn

from flaxformer_mt import parity
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.trace.module_values import Tap, values_of_module

X = torch.arange(6.0).reshape(2, 3)


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y.mul_(2)
        y += 1
        return y


class Twice(nn.Module):
    """The same module under two names, followed by a multiplication of its own."""

    def __init__(self):
        super().__init__()
        self.first = InPlace()
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x)) * 3


def tapped(module: nn.Module, **taps: Tap) -> dict[str, np.ndarray]:
    shapes = {name: tuple(X.shape) for name in taps}
    return values_of_module(module, taps, lambda module: module(X), shapes)[1]


def test_an_operation_in_place_has_an_input_of_its_own():
    seen = tapped(
        InPlace(),
        before=Tap("", "input", "mul"),
        after=Tap("", "output", "mul"),
        end=Tap("", "output", "add"),
    )
    np.testing.assert_array_equal(seen["before"], X)
    np.testing.assert_array_equal(seen["after"], 2 * X)
    np.testing.assert_array_equal(seen["end"], 2 * X + 1)


def test_a_module_with_two_names_counts_its_calls_under_both():
    seen = tapped(Twice(), one=Tap("second"), two=Tap("first", call=1), last=Tap("first", call=-1))
    np.testing.assert_array_equal(seen["one"], 2 * X + 1)
    np.testing.assert_array_equal(seen["two"], 4 * X + 3)
    np.testing.assert_array_equal(seen["last"], seen["two"])


def test_a_module_s_own_operations_come_before_those_of_its_parts():
    seen = tapped(Twice(), own=Tap("", op="mul"), of_a_part=Tap("", op="add", call=1))
    np.testing.assert_array_equal(seen["own"], 12 * X + 9)
    np.testing.assert_array_equal(seen["of_a_part"], 4 * X + 3)


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays(fails):
    module = InPlace()
    if fails:
        module.forward = lambda x: x @ x
        with pytest.raises(RuntimeError):
            tapped(module, value=Tap(""))
    else:
        tapped(module, value=Tap(""))
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_taps_of_layers_are_names_and_expressions():
    found = parity.for_layers(
        3,
        {
            "layers/{layer}": "blocks.{2*layer}",
            "norms/{number}": parity.Tap("blocks.{ 2*layer + 1 }", "input"),
            "previous/{layer}": "blocks.{number-1}",
        },
    )
    assert found["layers/2"] == parity.Tap("blocks.4")
    assert found["norms/3"] == parity.Tap("blocks.5", "input")
    assert found["previous/1"] == parity.Tap("blocks.1")
    assert len(found) == 9
    for name in ("blocks.{layers}", "blocks.{layer**9}", "blocks.{}"):
        with pytest.raises(UserError, match=r"blocks\..*must be such as \{layer\}"):
            parity.for_layers(1, {"layers/{layer}": name})
