"""Faults of a published decoder and a port of it: their sites, their causes, never a wrong cause.

Source: https://github.com/lucidrains/PaLM-pytorch (MIT License), version 0.2.2. It has rotary
positions, one head of keys and values, and a gate beside the attention. Its forward functions are
split into parts here, so that a fault replaces one of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from module_changes import with_output, with_values
from torch import nn
from torch.nn import functional as F

from flaxformer_mt import parity
from flaxformer_mt.interop.weight_maps.rules import same, tied, transposed

LENGTH, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY = 7, 12, 3, 6, 8, 17


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.epsilon, self.centered, self.scaled = 1e-5, True, True

    def forward(self, x):
        mean = x.mean(-1, keepdim=True) if self.centered else 0
        variance = (x - mean).square().mean(-1, keepdim=True)
        x = (x - mean) / (variance + self.epsilon).sqrt()
        return x * self.gamma if self.scaled else x


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(angles, x):
    return x * angles.cos() + rotate_half(x) * angles.sin()


def rotate_neighbors(angles, x):
    angles = angles.chunk(2, -1)[0].repeat_interleave(2, -1)
    other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return x * angles.cos() + other * angles.sin()


class Gate(nn.Module):
    kind, order = staticmethod(F.silu), (0, 1)

    def forward(self, x):
        parts = x.chunk(2, -1)
        return self.kind(parts[self.order[1]]) * parts[self.order[0]]


class Block(nn.Module):
    rotate, residual, scale, axis, mask = staticmethod(rotate), 1.0, HEAD**-0.5, -1, 1
    softmax = staticmethod(torch.softmax)
    split = staticmethod(lambda x: x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2))
    join = staticmethod(lambda x: x.transpose(1, 2).flatten(2))
    key, value = 0, 1

    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.sizes = (HEADS * HEAD, HEAD, HEAD, 2 * HIDDEN)
        self.fused_attn_ff_proj = nn.Linear(WIDTH, sum(self.sizes), bias=False)
        self.attn_out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.ff_out = nn.Sequential(Gate(), nn.Linear(HIDDEN, WIDTH, bias=False))
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD))

    def forward(self, x):
        q, *others, ff = self.fused_attn_ff_proj(self.norm(x)).split(self.sizes, -1)
        k, v = others[self.key], others[self.value]
        angles = (torch.arange(LENGTH)[:, None] * self.inv_freq).repeat(1, 2)
        q, k = (self.rotate(angles, part) for part in (self.split(q), k))
        similarity = torch.einsum("bhid,bjd->bhij", q * self.scale, k)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(self.mask)
        similarity = similarity.masked_fill(future, -torch.finfo(similarity.dtype).max)
        weights = self.softmax(similarity, self.axis)
        out = self.join(torch.einsum("bhij,bjd->bhid", weights, v))
        return self.attn_out(out) + self.ff_out(ff) + self.residual * x


def palm():
    """The module in float64, with weights of which none is special."""
    torch.manual_seed(0)
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), Norm(), output)
    net[-1].weight = net[0].weight
    for name, parameter in net.named_parameters():
        nn.init.normal_(parameter, mean=float("gamma" in name), std=0.5)
    return net.double()


def port(params, tokens):
    def norm(x, gamma):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * gamma

    def turned(x, frequencies):
        angles = jnp.arange(LENGTH, dtype=x.dtype)[:, None] * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = parity.tap("embedded", params["embedding"][tokens])
    for i, p in enumerate(params["layers"]):
        with parity.scope(f"layers/{i}"):
            projected = parity.tap("projected", parity.tap("norm", norm(x, p["norm"])) @ p["fused"])
            ends = np.cumsum([HEADS * HEAD, HEAD, HEAD])
            q, k, v, ff = jnp.split(projected, ends, -1)
            q = turned(q.reshape(*tokens.shape, HEADS, HEAD).swapaxes(1, 2), p["frequencies"])
            scores = q @ turned(k, p["frequencies"])[:, None].swapaxes(2, 3) / math.sqrt(HEAD)
            scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
            context = jax.nn.softmax(scores) @ v[:, None]
            attended = context.swapaxes(1, 2).reshape(*tokens.shape, -1) @ p["out"]
            first, gate = jnp.split(ff, 2, -1)
            gated = parity.tap("gated", jax.nn.silu(gate) * first)
            x = parity.tap("layer", parity.tap("attended", attended) + gated @ p["narrow"] + x)
    x = parity.tap("final", norm(x, params["norm"]))
    return x @ params["embedding"].T


LAYER = {
    "norm": ("norm.gamma", same),
    "fused": ("fused_attn_ff_proj.weight", transposed),
    "out": ("attn_out.weight", transposed),
    "narrow": ("ff_out.1.weight", transposed),
    "frequencies": ("inv_freq", same),
}
WEIGHTS = [
    tied("embedding", "0.weight", "4.weight"),
    same("norm", "3.gamma"),
    *(
        rule(f"layers/{i}/{ours}", f"{i + 1}.{theirs}")
        for i in range(2)
        for ours, (theirs, rule) in LAYER.items()
    ),
]
NAMES = {
    "embedded": "0",
    "final": "3",
    **parity.for_layers(
        2,
        {
            "layers/{layer}/norm": "{number}.norm",
            "layers/{layer}/projected": "{number}.fused_attn_ff_proj",
            "layers/{layer}/attended": "{number}.attn_out",
            "layers/{layer}/gated": "{number}.ff_out.0",
            "layers/{layer}/layer": "{number}",
        },
    ),
}


def compared(change=lambda module: None):
    module = palm()
    layer = {
        "norm": (WIDTH,),
        "fused": (WIDTH, (HEADS + 2) * HEAD + 2 * HIDDEN),
        "out": (HEADS * HEAD, WIDTH),
        "narrow": (HIDDEN, WIDTH),
        "frequencies": (HEAD // 2,),
    }
    shapes = {"embedding": (VOCABULARY, WIDTH), "norm": (WIDTH,), "layers": [layer, layer]}
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    change(module)
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(4, LENGTH))
    return parity.compare_models(module, port, params, tokens, names=NAMES, weights=WEIGHTS)


def narrow_softmax(scores, axis):
    return scores.float().softmax(axis).type_as(scores)


FAULTS = {
    "embedding scale": ("embedded", with_output("0", lambda _, y, x: y * WIDTH**0.5)),
    "norm epsilon": ("layers/1/norm", with_values("2.norm", epsilon=1e-6)),
    "root-mean-square norm": ("final", with_values("3", centered=False)),
    "scale missing": ("layers/1/norm", with_values("2.norm", scaled=False)),
    "rotation layout": ("layers/1/attended", with_values("2", rotate=rotate_neighbors)),
    "rotation direction": (
        "layers/1/attended",
        with_values("2", rotate=lambda angles, x: rotate(-angles, x)),
    ),
    "rotation missing": ("layers/1/attended", with_values("2", rotate=lambda angles, x: x)),
    "attention scale": ("layers/1/attended", with_values("2", scale=1.0)),
    "causal mask off by one": ("layers/1/attended", with_values("2", mask=0)),
    "missing causal mask": ("layers/1/attended", with_values("2", mask=LENGTH)),
    "head order": (
        "layers/1/attended",
        with_values("2", split=lambda x: x.unflatten(-1, (HEAD, HEADS)).permute(0, 3, 1, 2)),
    ),
    "head order, joined": (
        "layers/1/attended",
        with_values("2", join=lambda x: x.reshape(len(x), LENGTH, -1)),
    ),
    "softmax axis": ("layers/1/attended", with_values("2", axis=-2)),
    "exchanged operands": ("layers/1/gated", with_values("2.ff_out.0", order=(1, 0))),
    "exchanged operands, in attention": ("layers/1/attended", with_values("2", key=1, value=0)),
    "activation": ("layers/1/gated", with_values("2.ff_out.0", kind=F.gelu)),
    "residual missing": ("layers/1/layer", with_values("2", residual=0.0)),
    "residual scale": ("layers/1/layer", with_values("2", residual=0.5)),
    "precision": ("layers/1/attended", with_values("2", softmax=narrow_softmax)),
    "scale": ("output", with_output("4", lambda _, y, x: 0.5 * y)),
}
_QUICK = ("embedding scale", "attention scale")


def test_the_port_computes_what_the_module_does():
    report = compared()
    assert report.passed, report
    assert not report.untapped


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in FAULTS],
)
def test_faults_have_their_sites_and_causes(fault):
    site, change = FAULTS[fault]
    report = compared(change)
    found = [(each.site, each.diagnosis and each.diagnosis.cause) for each in report.findings]
    assert found == [(site, fault.split(",")[0])], report
    assert not [note for note in report.notes if "not tested" in note]
