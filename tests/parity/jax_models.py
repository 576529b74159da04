"""GPT-2 as a short JAX function, with the rules of its weights, and parts of such functions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.interop.weight_maps.rules import norm, packed, same, tied
from flaxformer_mt.parity import scope, tap


def layer_norm(p, x, epsilon):
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    return centered / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def attend(p, x, heads, mask):
    """Multi-head self-attention [B, T, D]; the mask broadcasts to [B, H, T, T]."""

    def split(name):
        y = tap(name, dense(p[name], x))
        return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, v = map(split, ("query", "key", "value"))
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    scores = tap("scores", jnp.where(mask, scores, -jnp.inf))
    context = tap("weights", jax.nn.softmax(scores)) @ v
    return tap("output", dense(p["output"], context.swapaxes(1, 2).reshape(x.shape)))


def gpt2(params, tokens, heads=4):
    """GPT-2: pre-norm, learned positions, tied output."""
    length = tokens.shape[1]
    x = tap("embedded", params["tokens"][tokens] + params["positions"][:length])
    for i, p in enumerate(params["layers"]):
        with scope(f"layers/{i}"):
            y = tap("norm_1", layer_norm(p["norm_1"], x, 1e-5))
            with scope("attention"):
                x = x + attend(p["attention"], y, heads, jnp.tri(length, dtype=bool))
            y = tap("norm_2", layer_norm(p["norm_2"], tap("attended", x), 1e-5))
            hidden = jax.nn.gelu(tap("hidden", dense(p["hidden"], y)), approximate=True)
            x = tap("output", x + dense(p["narrow"], tap("activated", hidden)))
    return tap("norm", layer_norm(params["norm"], x, 1e-5)) @ params["tokens"].T


def conv1d(ours, theirs):
    return [same(f"{ours}/kernel", f"{theirs}.weight"), same(f"{ours}/bias", f"{theirs}.bias")]


GPT2_WEIGHTS = [
    tied("tokens", "transformer.wte.weight", "lm_head.weight"),
    same("positions", "transformer.wpe.weight"),
    *norm("norm", "transformer.ln_f"),
    *norm("layers/{layer}/norm_1", "transformer.h.{layer}.ln_1"),
    *norm("layers/{layer}/norm_2", "transformer.h.{layer}.ln_2"),
    *(
        packed(
            [f"layers/{{layer}}/attention/{part}/{ours}" for part in ("query", "key", "value")],
            f"transformer.h.{{layer}}.attn.c_attn.{theirs}",
            same,
            axis,
        )
        for ours, theirs, axis in (("kernel", "weight", 1), ("bias", "bias", 0))
    ),
    *conv1d("layers/{layer}/attention/output", "transformer.h.{layer}.attn.c_proj"),
    *conv1d("layers/{layer}/hidden", "transformer.h.{layer}.mlp.c_fc"),
    *conv1d("layers/{layer}/narrow", "transformer.h.{layer}.mlp.c_proj"),
]


def shapes(rules, module, depth):
    """The tree of the parameters that rules give, with lists of layers."""
    tree = {}
    state = module.state_dict()
    for rule in rules:
        for layer in range(depth if any("{" in path for path in rule.ours) else 1):
            tensors = [state[name.format(layer=layer)].numpy() for name in rule.theirs]
            for path, array in zip(rule.ours, rule.to_ours(*tensors), strict=True):
                *parents, leaf = path.format(layer=layer).split("/")
                branch = tree
                for parent in parents:
                    branch = branch.setdefault(parent, {})
                branch[leaf] = jax.ShapeDtypeStruct(array.shape, np.float32)
    for branch in (tree, *tree.values()):
        if isinstance(branch, dict) and "layers" in branch:
            branch["layers"] = [branch["layers"][str(layer)] for layer in range(depth)]
    return tree
