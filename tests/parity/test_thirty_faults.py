"""Thirty faults of newer models, ten of them in pairs: places, causes, and never a wrong cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from flaxformer_mt import parity
from flaxformer_mt.interop.weight_maps.rules import same

LENGTH, WIDTH, HEADS, GROUPS, HEAD, HIDDEN, VOCABULARY = 6, 16, 4, 2, 4, 12, 19
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
FREQUENCIES = np.array([1.0, 0.1])
MATRICES = {
    "query": (WIDTH, HEADS * HEAD), "key": (WIDTH, GROUPS * HEAD), "value": (WIDTH, GROUPS * HEAD),
    "out": (HEADS * HEAD, WIDTH), "wide": (WIDTH, 2 * HIDDEN), "narrow": (HIDDEN, WIDTH),
}  # fmt: skip
CROSS = ("cross_query", "cross_key", "cross_value", "cross_out")
SHAPES = {
    **MATRICES,
    **{name: MATRICES[name.removeprefix("cross_")] for name in CROSS},
    "gamma_1": (WIDTH,), "gamma_2": (WIDTH,), "gamma_3": (WIDTH,), "gamma_4": (WIDTH,),
    "embedding": (VOCABULARY, WIDTH),
}  # fmt: skip


class Model(nn.Module):
    """Rotary positions, ALiBi, RMS norms, gates, grouped queries and cross-attention."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(*shape) / 3 + (len(shape) == 1)))
        sites = ("embedded", "scores", "attended", "cross_scores", "crossed", "normed", "activated",
                 "layer")  # fmt: skip
        for name in sites:
            setattr(self, f"at_{name}", nn.Identity())
        self.faults = frozenset()

    def norm(self, x, gamma):
        if "centered" in self.faults and gamma is self.gamma_2:
            x = x - x.mean(-1, keepdim=True)
        epsilon = 1e-3 if "epsilon" in self.faults and gamma is self.gamma_2 else 1e-6
        x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
        if gamma is self.gamma_2 and "no gamma" in self.faults:
            return x
        return x * (gamma + 1 if "plus one" in self.faults and gamma is self.gamma_2 else gamma)

    def rotate(self, x):
        start = 1.0 if "offset" in self.faults else 0.0
        positions = torch.arange(LENGTH).double() + start
        frequencies = torch.tensor(FREQUENCIES * (0.5 if "frequencies" in self.faults else 1))
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if "other direction" in self.faults:
            sin = -sin
        if "neighbors" in self.faults:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(self, x, name):
        x = x @ getattr(self, name)
        if "head order" in self.faults and name == "query":
            return x.unflatten(-1, (HEAD, -1)).transpose(-1, -2).transpose(1, 2)
        return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    def groups(self, x):
        return x.repeat(1, 2, 1, 1) if "tiled" in self.faults else x.repeat_interleave(2, 1)

    def join(self, x):
        if "join" in self.faults:
            return x.permute(0, 2, 3, 1).flatten(2)
        return x.transpose(1, 2).flatten(2)

    def attend(self, x):
        q, k, v = (self.heads(x, name) for name in ("query", "key", "value"))
        q = q if "unrotated queries" in self.faults else self.rotate(q)
        k = k if "unrotated keys" in self.faults else self.rotate(k)
        k, v = self.groups(k), self.groups(v)
        if "exchanged" in self.faults:
            q, k = k, q
        distances = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        bias = -torch.tensor(SLOPES)[:, None, None] * distances.abs()
        if "slopes" in self.faults:
            bias = 2 * bias
        if "no bias" in self.faults:
            bias = 0 * bias
        scale = {"no scale": 1.0, "width scale": WIDTH**-0.5}
        scale = next((scale[name] for name in scale if name in self.faults), HEAD**-0.5)
        scores = q @ k.transpose(2, 3)
        scores = (scores + bias) * scale if "place" in self.faults else scores * scale + bias
        seen = distances >= (1 if "strict" in self.faults else 0)
        seen = (
            seen | (distances >= 0)
            if "strict" not in self.faults
            else seen | (torch.arange(LENGTH)[:, None] + torch.arange(LENGTH) == 0)
        )
        if "unmasked" not in self.faults:
            scores = scores.masked_fill(~seen, -1e9)
        return self.join(self.at_scores(scores).softmax(-1) @ v) @ self.out

    def cross(self, x, memory, real):
        q = self.heads(x, "cross_query")
        k, v = (self.groups(self.heads(memory, f"cross_{name}")) for name in ("key", "value"))
        scores = q @ k.transpose(2, 3) * HEAD**-0.5
        if "unpadded" not in self.faults:
            scores = scores.masked_fill(~real[:, None, None], -1e9)
        axis = 1 if "softmax axis" in self.faults else -1
        return self.join(self.at_cross_scores(scores).softmax(axis) @ v) @ self.cross_out

    def gate(self, x):
        gate, up = (x @ self.wide).chunk(2, -1)
        if "halves" in self.faults:
            gate, up = up, gate
        kind = nn.functional.gelu if "gelu" in self.faults else nn.functional.silu
        x = self.at_activated(kind(gate) * up)
        return (x * x if "squared" in self.faults else x) @ self.narrow

    def forward(self, tokens, memory, real):
        x = self.embedding[tokens]
        x = self.at_embedded(x if "no embedding scale" in self.faults else x * WIDTH**0.5)
        y = self.at_attended(self.attend(self.norm(x, self.gamma_1)))
        x = y if "no residual" in self.faults else x + y
        x = x + self.at_crossed(self.cross(x, memory, real))
        y = self.gate(self.at_normed(self.norm(x, self.gamma_2)))
        x = self.at_layer(x + (0.5 * y if "residual scale" in self.faults else y))
        x = self.norm(x, self.gamma_3 if "another gamma" not in self.faults else self.gamma_4)
        logits = x @ self.embedding.T
        return logits * 0.5 if "scaled logits" in self.faults else logits


def function(params, tokens, memory, real):
    def norm(x, name):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * params[name]

    def heads(x, name):
        x = x @ params[name]
        return x.reshape(*x.shape[:2], -1, HEAD).swapaxes(1, 2)

    def rotate(x):
        angles = jnp.arange(LENGTH, dtype=x.dtype)[:, None] * jnp.array(FREQUENCIES)
        a, b = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def groups(x):
        return jnp.repeat(x, 2, axis=1)

    def join(x):
        return x.swapaxes(1, 2).reshape(*tokens.shape, -1)

    x = parity.tap("embedded", params["embedding"][tokens] * WIDTH**0.5)
    y = norm(x, "gamma_1")
    q, k, v = (heads(y, name) for name in ("query", "key", "value"))
    distances = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    bias = -jnp.array(SLOPES)[:, None, None] * jnp.abs(distances).astype(x.dtype)
    scores = rotate(q) @ groups(rotate(k)).swapaxes(2, 3) * HEAD**-0.5 + bias
    scores = parity.tap("scores", jnp.where(distances >= 0, scores, -1e9))
    attended = join(jax.nn.softmax(scores) @ groups(v)) @ params["out"]
    x = x + parity.tap("attended", attended)
    k, v = (groups(heads(memory, f"cross_{name}")) for name in ("key", "value"))
    scores = heads(x, "cross_query") @ k.swapaxes(2, 3) * HEAD**-0.5
    scores = parity.tap("cross_scores", jnp.where(real[:, None, None], scores, -1e9))
    x = x + parity.tap("crossed", join(jax.nn.softmax(scores) @ v) @ params["cross_out"])
    y = parity.tap("normed", norm(x, "gamma_2"))
    gate, up = jnp.split(y @ params["wide"], 2, -1)
    x = x + parity.tap("activated", jax.nn.silu(gate) * up) @ params["narrow"]
    x = norm(parity.tap("layer", x), "gamma_3") + 0 * params["gamma_4"]
    return x @ params["embedding"].T


# The cause by site of each fault; None: no known cause.
FAULTS = {
    "neighbors": {"scores": "rotation layout"},
    "offset": {},  # Only distances count.
    "frequencies": {"scores": None},
    "other direction": {"scores": "rotation direction"},
    "unrotated queries": {"scores": "rotation missing"},
    "unrotated keys": {"scores": "rotation missing"},
    "tiled": {
        "scores": "repeated heads",
        "attended": "repeated heads",
        "cross_scores": "repeated heads",
        "crossed": "repeated heads",
    },
    "exchanged": {"scores": None},
    "head order": {"scores": "head order"},
    "join": {"attended": "head order", "crossed": "head order"},
    "slopes": {"scores": "position bias added twice"},
    "no bias": {"scores": "position bias missing"},
    "no scale": {"scores": "attention scale"},
    "width scale": {"scores": "attention scale"},
    "place": {"scores": "place of a scale"},
    "strict": {"scores": "extra mask"},
    "unmasked": {"scores": "missing causal mask"},
    "unpadded": {"cross_scores": "missing padding mask"},
    "softmax axis": {"crossed": "softmax axis"},
    "halves": {"activated": "exchanged operands"},
    "gelu": {"activated": "activation"},
    "squared": {"layer": None},
    "no embedding scale": {"embedded": "embedding scale"},
    "no residual": {  # The sum is no site: each that reads it differs.
        "cross_scores": "residual missing",
        "normed": "residual missing",
        "layer": "residual missing",
    },
    "residual scale": {"layer": "residual scale"},
    "epsilon": {"normed": "norm epsilon"},
    "centered": {"normed": "root-mean-square norm"},
    "plus one": {"normed": "scale plus 1"},
    "no gamma": {"normed": "scale missing"},
    "another gamma": {"output": "wrong weights"},
    "scaled logits": {"output": "scale"},
}
PAIRS = [
    ("neighbors", "gelu"), ("tiled", "plus one"), ("place", "halves"), ("strict", "scaled logits"),
    ("no scale", "epsilon"), ("head order", "residual scale"), ("unpadded", "another gamma"),
    ("unmasked", "softmax axis"), ("no embedding scale", "no gamma"), ("width scale", "join"),
]  # fmt: skip


def found_by(faults):
    torch.manual_seed(0)
    module = Model().double()
    module.faults = frozenset(faults)
    random = np.random.default_rng(0)
    report = parity.compare_models(
        module,
        function,
        {name: np.zeros(shape) for name, shape in SHAPES.items()},
        (
            random.integers(1, VOCABULARY, (4, LENGTH)),
            random.normal(size=(4, 7, WIDTH)),
            np.arange(7) < np.array([7, 5, 6, 3])[:, None],
        ),
        names={name.removeprefix("at_"): name for name, _ in module.named_modules() if name},
        weights=[same(name, name) for name in SHAPES],
    )
    return report, {each.site: each.diagnosis and each.diagnosis.cause for each in report.findings}


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [(), *PAIRS, *((name,) for name in FAULTS)],
    ids=lambda faults: "+".join(faults) or "none",
)
def test_faults_have_their_places_and_causes(faults):
    report, found = found_by(faults)
    assert found == {site: cause for name in faults for site, cause in FAULTS[name].items()}, report
    assert not [note for note in report.notes if "not tested" in note]
