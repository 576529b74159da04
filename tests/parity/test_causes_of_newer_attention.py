"""Faults of rotary positions, grouped queries, biases, gates and RMS norms have their causes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from flaxformer_mt import parity
from flaxformer_mt.interop.weight_maps.rules import same, transposed


class Attention(nn.Module):
    """Grouped queries with rotary positions and a bias, and a gated layer after an RMS norm."""

    neighbors = tiled = scales_bias = plus_one = gate_first = False

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
        self.value, self.wide = nn.Linear(8, 8, bias=False), nn.Linear(16, 12, bias=False)
        self.scores, self.mixed, self.normed = nn.Identity(), nn.Identity(), nn.Identity()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def rotate(self, x):
        angles = torch.arange(5.0)[:, None].double() * torch.tensor([1.0, 0.1]).double()
        cos, sin = angles.cos(), angles.sin()
        if self.neighbors:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x[..., :2], x[..., 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        k = self.rotate(k)
        k, v = (y.repeat(1, 2, 1, 1) if self.tiled else y.repeat_interleave(2, 1) for y in (k, v))
        q = self.rotate(q)
        bias = -torch.arange(5.0).sub(torch.arange(5.0)[:, None]).abs()
        scores = q @ k.transpose(2, 3)
        scores = (scores + bias) * 0.5 if self.scales_bias else scores * 0.5 + bias
        y = (self.scores(scores).softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = self.mixed(y)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = self.normed(y * (self.gamma + 1 if self.plus_one else self.gamma))
        gate, up = self.wide(y).chunk(2, -1)
        if self.gate_first:
            gate, up = up, gate
        return gate.sigmoid() * up


def attention(params, x):
    def heads(name):
        y = x @ params[name]
        return y.reshape(*y.shape[:2], -1, 4).swapaxes(1, 2)

    def rotate(x):
        angles = jnp.arange(5.0)[:, None] * jnp.array([1.0, 0.1])
        angles = angles.astype(x.dtype)
        a, b = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    k, v = (jnp.repeat(y, 2, axis=1) for y in (rotate(heads("key")), heads("value")))
    q = rotate(heads("query"))
    distances = -jnp.abs(jnp.arange(5) - jnp.arange(5)[:, None]).astype(x.dtype)
    scores = parity.tap("scores", q @ k.swapaxes(2, 3) * 0.5 + distances)
    y = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(*x.shape[:2], 16)
    y = parity.tap("mixed", y)
    y = y / jnp.sqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
    gate, up = jnp.split(parity.tap("normed", y * params["gamma"]) @ params["wide"], 2, -1)
    return jax.nn.sigmoid(gate) * up


FAULTS = {
    "neighbors": {"scores": "rotary positions"},
    "tiled": {"scores": "repeated heads", "mixed": "repeated heads"},
    "scales_bias": {"scores": "place of a scale"},
    "plus_one": {"normed": "scale plus 1"},
    "gate_first": {"output": "exchanged operands"},
}


@pytest.mark.slow_except("faults1")
@pytest.mark.parametrize(
    "faults",
    [(), *((name,) for name in FAULTS), ("neighbors", "gate_first"), ("tiled", "plus_one")],
)
def test_faults_have_their_causes(faults):
    torch.manual_seed(0)
    module = Attention().double()
    for name in faults:
        setattr(module, name, True)
    shapes = {"query": (8, 16), "key": (8, 8), "value": (8, 8), "wide": (16, 12), "gamma": (16,)}
    report = parity.compare_models(
        module,
        attention,
        {name: np.zeros(shape) for name, shape in shapes.items()},
        np.random.default_rng(0).normal(size=(3, 5, 8)),
        weights=[
            *(transposed(name, f"{name}.weight") for name in ("query", "key", "value", "wide")),
            same("gamma", "gamma"),
        ],
    )
    found = {each.site: each.diagnosis and each.diagnosis.cause for each in report.findings}
    assert found == {site: cause for name in faults for site, cause in FAULTS[name].items()}, report
    assert not [note for note in report.notes if "not tested" in note]
