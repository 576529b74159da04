"""Public models of `transformers` as short JAX functions, with the rules of their weights."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.interop.weight_maps.rules import linear, norm, packed, same, tied
from flaxformer_mt.parity import scope, tap


def layer_norm(p, x, epsilon):
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    return centered / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def dense(p, x):
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def attend(p, x, heads, mask=True, memory=None, hidden=-jnp.inf):
    """Multi-head attention [B, T, D]; the mask broadcasts to [B, H, T, S]."""
    memory = x if memory is None else memory

    def split(name, x):
        y = tap(name, dense(p[name], x))
        return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, v = split("query", x), split("key", memory), split("value", memory)
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    scores = tap("scores", jnp.where(mask, scores, hidden))
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


def bert(params, tokens, types, mask, heads=4):
    """BERT: post-norm, learned positions, token types."""
    words = params["tokens"][tokens]
    words = jnp.where(tokens[..., None] == 0, jax.lax.stop_gradient(words), words)  # Padding.
    x = words + params["types"][types] + params["positions"][: tokens.shape[1]]
    x = tap("embedded", layer_norm(params["norm"], x, 1e-12))
    for i, p in enumerate(params["layers"]):
        with scope(f"layers/{i}"):
            y = attend(p["attention"], x, heads, mask[:, None, None] != 0)
            x = tap("norm_1", layer_norm(p["norm_1"], x + y, 1e-12))
            hidden = jax.nn.gelu(tap("hidden", dense(p["hidden"], x)), approximate=False)
            x = tap("output", layer_norm(p["norm_2"], x + dense(p["narrow"], hidden), 1e-12))
    return x, jnp.tanh(dense(params["pooler"], x[:, 0]))


def sandwich(p, x, heads, epsilon):
    """A pre-norm layer with a feed-forward network of GELUs."""
    with scope("attention"):
        y = tap("norm", layer_norm(p["norm_1"], x, epsilon))
        x = x + attend(p["attention"], y, heads)
    y = tap("norm_2", layer_norm(p["norm_2"], x, epsilon))
    hidden = jax.nn.gelu(tap("hidden", dense(p["hidden"], y)), approximate=False)
    return tap("output", x + dense(p["narrow"], hidden))


def convolution(p, x, strides, padding, numbers):
    kernel = p["kernel"]
    y = jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers)
    return y + p["bias"].reshape(-1, *[1] * len(strides))


def vit(params, pixels, heads=4):
    """A vision transformer: patches by a convolution, a class token, a pooled output."""
    patches = convolution(params["patches"], pixels, (4, 4), "VALID", ("NCHW", "OIHW", "NCHW"))
    patches = patches.reshape(*patches.shape[:2], -1).swapaxes(1, 2)
    first = jnp.broadcast_to(params["class"], (len(pixels), 1, patches.shape[-1]))
    x = tap("embedded", jnp.concatenate([first, patches], 1) + params["positions"])
    for i, p in enumerate(params["layers"]):
        with scope(f"layers/{i}"):
            x = sandwich(p, x, heads, 1e-12)
    x = tap("norm", layer_norm(params["norm"], x, 1e-12))
    return x, jnp.tanh(dense(params["pooler"], x[:, 0]))


def whisper_encoder(params, features, heads=4):
    """The encoder of Whisper: two convolutions over time, fixed positions."""
    numbers = ("NCH", "OIH", "NCH")
    x = convolution(params["conv_1"], features, (1,), [(1, 1)], numbers)
    x = convolution(params["conv_2"], jax.nn.gelu(x, approximate=False), (2,), [(1, 1)], numbers)
    x = jax.nn.gelu(x, approximate=False).swapaxes(1, 2) + params["positions"]
    for i, p in enumerate(params["layers"]):
        with scope(f"layers/{i}"):
            x = sandwich(p, x, heads, 1e-5)
    return tap("norm", layer_norm(params["norm"], x, 1e-5))


def transformer(params, source, target, table, heads=4):
    """The Transformer of hyunwoongko/transformer: post-norm, token 1 is padding."""

    def layer(p, x, masks, memory):
        for i, (name, mask) in enumerate(masks.items(), 1):
            with scope(name):
                y = attend(p[name], x, heads, mask, memory if name == "cross" else None, -1e4)
            x = tap(f"norm_{i}", layer_norm(p[f"norm_{i}"], x + y, 1e-12))
        hidden = jax.nn.relu(tap("hidden", dense(p["hidden"], x)))
        y = tap("narrow", dense(p["narrow"], hidden))
        return tap("norm_3", layer_norm(p["norm_3"], x + y, 1e-12))

    def stack(name, tokens, masks, memory=None):
        p = params[name]
        with scope(name):
            x = p["words"][tokens]
            x = jnp.where(tokens[..., None] == 1, jax.lax.stop_gradient(x), x)
            x = tap("embedded", x + table[: tokens.shape[1]])
            for i, of_layer in enumerate(p["layers"]):
                with scope(f"layers/{i}"):
                    x = layer(of_layer, x, masks, memory)
        return x

    real = (source != 1)[:, None, None]
    causal = (target != 1)[:, None, :, None] & jnp.tri(target.shape[1], dtype=bool)
    memory = stack("encoder", source, {"attention": real})
    x = stack("decoder", target, {"attention": causal, "cross": real}, memory)
    return dense(params["output"], x)


def layers(theirs, attention, output, norm_1, hidden, narrow, norm_2, bias=(True, True, True)):
    """The rules of a layer; `attention` names query, key and value."""
    ours = "layers/{layer}"
    return [
        *(
            rule
            for part, name, has_bias in zip(("query", "key", "value"), attention, bias, strict=True)
            for rule in linear(f"{ours}/attention/{part}", f"{theirs}.{name}", has_bias)
        ),
        *linear(f"{ours}/attention/output", f"{theirs}.{output}", True),
        *norm(f"{ours}/norm_1", f"{theirs}.{norm_1}"),
        *linear(f"{ours}/hidden", f"{theirs}.{hidden}", True),
        *linear(f"{ours}/narrow", f"{theirs}.{narrow}", True),
        *norm(f"{ours}/norm_2", f"{theirs}.{norm_2}"),
    ]


BERT_WEIGHTS = [
    same("tokens", "embeddings.word_embeddings.weight"),
    same("types", "embeddings.token_type_embeddings.weight"),
    same("positions", "embeddings.position_embeddings.weight"),
    *norm("norm", "embeddings.LayerNorm"),
    *layers(
        "encoder.layer.{layer}",
        [f"attention.self.{part}" for part in ("query", "key", "value")],
        "attention.output.dense",
        "attention.output.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    ),
    *linear("pooler", "pooler.dense", True),
]
VIT_WEIGHTS = [
    *conv1d("patches", "embeddings.patch_embeddings.projection"),
    same("class", "embeddings.cls_token"),
    same("positions", "embeddings.position_embeddings"),
    *layers(
        "layers.{layer}",
        [f"attention.{part}_proj" for part in "qkv"],
        "attention.o_proj",
        "layernorm_before",
        "mlp.fc1",
        "mlp.fc2",
        "layernorm_after",
    ),
    *norm("norm", "layernorm"),
    *linear("pooler", "pooler.dense", True),
]
WHISPER_WEIGHTS = [
    *conv1d("conv_1", "conv1"),
    *conv1d("conv_2", "conv2"),
    same("positions", "embed_positions.weight"),
    *layers(
        "layers.{layer}",
        [f"self_attn.{part}_proj" for part in "qkv"],
        "self_attn.out_proj",
        "self_attn_layer_norm",
        "fc1",
        "fc2",
        "final_layer_norm",
        bias=(True, False, True),
    ),
    *norm("norm", "layer_norm"),
]


def _transformer_layer(stack, attentions, norms):
    ours, theirs = f"{stack}/layers/{{layer}}", f"{stack}.layers.{{layer}}"
    return [
        *(
            rule
            for name, module in attentions.items()
            for part, its_name in zip(
                ("query", "key", "value", "output"), ("q", "k", "v", "concat"), strict=True
            )
            for rule in linear(f"{ours}/{name}/{part}", f"{theirs}.{module}.w_{its_name}", True)
        ),
        *(
            same(f"{ours}/{name}/{part}", f"{theirs}.{module}.{its_name}")
            for name, module in norms.items()
            for part, its_name in (("scale", "gamma"), ("bias", "beta"))
        ),
        *linear(f"{ours}/hidden", f"{theirs}.ffn.linear1", True),
        *linear(f"{ours}/narrow", f"{theirs}.ffn.linear2", True),
        same(f"{stack}/words", f"{stack}.emb.tok_emb.weight"),
    ]


TRANSFORMER_WEIGHTS = [
    *_transformer_layer(
        "encoder", {"attention": "attention"}, {"norm_1": "norm1", "norm_3": "norm2"}
    ),
    *_transformer_layer(
        "decoder",
        {"attention": "self_attention", "cross": "enc_dec_attention"},
        {"norm_1": "norm1", "norm_2": "norm2", "norm_3": "norm3"},
    ),
    *linear("output", "decoder.linear", True),
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
