"""The model and its kernels as functions of plain values, for training scripts.

Examples assume `import flaxformer_mt as fmt`, `import jax` and `import jax.numpy as jnp`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError, first_line
from flaxformer_mt.model.attention import ATTENTION, scaled_dot_product_attention
from flaxformer_mt.model.kernels import fused_attention as kernels
from flaxformer_mt.model.kernels import gpu_refusal
from flaxformer_mt.model.layers import FEED_FORWARD
from flaxformer_mt.model.logical_axes import mesh_device_kind, mesh_platform
from flaxformer_mt.model.masks import causal_mask, segment_mask
from flaxformer_mt.model.normalization import has_fused_norm, layer_norm
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.transformer import Transformer, require_segment_ids

_WRONG_PARAMS = (
    flax_errors.ScopeParamNotFoundError,
    flax_errors.ScopeParamShapeError,
    flax_errors.ApplyScopeInvalidVariablesStructureError,
)


def as_module(model: TransformerConfig | nn.Module) -> nn.Module:
    """Returns the model of a configuration, and a module that is called like it as it is."""
    return Transformer(model) if isinstance(model, TransformerConfig) else model


def init(config: TransformerConfig | nn.Module, key: Array) -> dict[str, Any]:
    """Returns initial parameters, a tree of nested dicts in `config.param_dtype`.

        config = fmt.TransformerConfig(source_vocab_size=100, target_vocab_size=100, d_model=64)
        params = jax.jit(fmt.init, static_argnums=0)(config, jax.random.key(0))

    Args:
      config: the model, or a module that is called like `Transformer`.
      key: of `jax.random`.
    """
    module = as_module(config)
    tokens = jnp.zeros((1, 1), jnp.int32)  # No parameter depends on their shape.
    if not module.config.has_targets:
        return module.init(key, tokens, method="encode")["params"]
    source = tokens if module.config.has_inputs else None
    return module.init(key, source, tokens)["params"]


def with_layer_options(config: TransformerConfig) -> TransformerConfig:
    """Returns a configuration that names all options of registered layers, for a run to record."""
    return dataclasses.replace(
        config,
        attention_kind=ATTENTION.resolved(config.attention_kind),
        feed_forward_kind=FEED_FORWARD.resolved(config.feed_forward_kind),
    )


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the model, by path.

    With vocabularies of size 0 these are the parameters of the stacks alone.
    """
    # Layers are alike, dtypes do not matter, and sinusoids, which may be many, are not parameters;
    # but the model needs some vocabulary to initialize.
    model = dataclasses.replace(
        config,
        source_vocab_size=max(config.source_vocab_size, 1),
        target_vocab_size=max(config.target_vocab_size, 1),
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_length=config.max_length if config.position_kind == "learned" else 1,
        dtype="float32",
        param_dtype="float32",
    )
    params = jax.eval_shape(lambda: init(model, jax.random.key(0)))
    counts = {
        ("source_embedding", "embedding"): config.source_vocab_size,
        ("target_embedding", "embedding"): config.target_vocab_size,
        ("output", "kernel"): config.target_vocab_size,
        ("output", "bias"): config.target_vocab_size,
        ("encoder", "layers"): config.num_encoder_layers,
        ("decoder", "layers"): config.num_decoder_layers,
    }
    shapes = {}
    for path, leaf in flatten_dict(params).items():
        count = counts.get(path[:2])
        if count != 0:
            layered = path[1] == "layers"
            shapes["/".join(path)] = (count, *leaf.shape[1:]) if layered else leaf.shape
    return shapes


def require_params(config: TransformerConfig, params: Any, name: str = "params") -> None:
    """Raises UserError unless a tree has all parameters of a model, in their shapes.

    Further leaves are allowed. `name` says where the tree comes from.
    """
    if not isinstance(params, Mapping):
        raise UserError(
            f"{name}: not a model, which is nested dicts of arrays, but {type(params).__name__}"
        )
    expected, found = parameter_shapes(config), flatten_dict(params, sep="/")
    missing = [path for path in expected if path not in found]
    if missing:
        others = f" and {len(missing) - 1} others are" if len(missing) > 1 else " is"
        hint = '; give its entry "params"' if "params" in params else ""
        raise UserError(
            f"{name}: not the parameters of this model: {missing[0]}{others} missing; found "
            f"{', '.join(sorted(map(str, params))) or 'nothing'}{hint}"
        )
    for path, shape in expected.items():
        if found[path].shape != shape:
            raise UserError(
                f"{name}: not the parameters of this model: {path} has the shape "
                f"{found[path].shape}, the model's configuration {shape}"
            )


def apply(
    config: TransformerConfig, params: Any, batch: Any, key: Array | None = None
) -> Float[Array, "B T V"]:
    """Returns the logits of every next target token, in float32 at least.

        config = fmt.TransformerConfig(source_vocab_size=100, target_vocab_size=100, d_model=64)
        params = fmt.init(config, jax.random.key(0))
        source, target = jnp.array([[5, 6, 2]]), jnp.array([[1, 7]])
        batch = {"encoder_input_tokens": source, "decoder_input_tokens": target}
        logits = fmt.apply(config, params, batch)  # [1, 2, 100]

    The logits are differentiable in reverse mode, by `jax.grad` and `jax.vjp`. Lookups, norms and
    kernels define their own gradients, so `jax.jvp` raises a TypeError of JAX.

    Args:
      config: the model.
      params: from `init`.
      batch: a `Batch` of `fmt.packed`, another object with its attributes, or a mapping with their
        names: `encoder_input_tokens` [B, S] (unless `config.has_inputs` is False) and
        `decoder_input_tokens` [B, T]; optionally the segment ids and positions of both, without
        which a row is one sentence, and padding is where the token is `config.pad_id`.
      key: of `jax.random`, for dropout; None = no dropout.

    Raises:
      UserError: the batch has no tokens, or positions without segment ids, or the parameters are
        those of another model, or the model is an encoder alone.
    """
    return apply_to_batch(config, params, batch, key)


def apply_to_batch(
    model: TransformerConfig | nn.Module, params: Any, batch: Any, key: Array | None, **options: Any
) -> Any:
    """Applies a model with other options of `Transformer.__call__`; arguments as of `apply`.

    With project=False, `UserError` if a module does not have that option.
    """
    module = as_module(model)
    arguments = inspect.signature(type(module).__call__).parameters.values()
    if "project" in options and not any(
        each.name == "project" or each.kind is each.VAR_KEYWORD for each in arguments
    ):
        raise UserError(
            f"{type(module).__name__} has no argument `project`: this loss calls the model with "
            "project=False, and needs what `Transformer` returns then, the factors of the logits "
            "(`OutputFactors`)"
        )

    def value(name: str) -> Array | None:
        return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)

    has_inputs = module.config.has_inputs
    for side in ("encoder", "decoder") if has_inputs else ("decoder",):
        if value(f"{side}_input_tokens") is None:
            raise UserError(f"the batch has no {side}_input_tokens")
        require_segment_ids(side, value(f"{side}_segment_ids"), value(f"{side}_positions"))
        for name in (f"{side}_segment_ids", f"{side}_positions"):
            options[name] = value(name)
    try:
        return module.apply(
            {"params": params},
            value("encoder_input_tokens") if has_inputs else None,
            value("decoder_input_tokens"),
            deterministic=key is None,
            rngs=None if key is None else {"dropout": key},
            **options,
        )
    except _WRONG_PARAMS as error:
        if type(module) is Transformer:
            require_params(module.config, params)
        raise UserError(f"params: not the parameters of this model: {first_line(error)}") from error


def fused_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G U"],
    *,
    segments: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    causal: bool = False,
    bias: Float[Array, "#B #H #T #S"] | None = None,
) -> Float[Array, "B T H U"]:
    r"""Computes attention in one kernel of the platform, or by XLA where there is none.

    .. math:: \mathrm{softmax}(Q K^\top / \sqrt{K} + bias)\, V

        q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4, 16))
        segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]] * 2)
        context = fmt.fused_attention(q, k, v, segments=segments, causal=True)  # [2, 8, 4, 16]

    The kernels (NVIDIA GPUs, TPUs) do not write the weights to memory; docs/training.md lists what
    they can do. On a mesh with `flax.linen.logical_axis_rules`, each device computes its own rows
    and heads. All arrays except segments are differentiable.

    Args:
      q: queries.
      k: keys; G divides H, and query head h attends to head h // (H / G).
      v: values.
      segments: the number of each token's sentence in its row, of queries and keys, or one array
        for both; a query sees the keys of its own segment, and none of segment 0. None = a row is
        one sentence without padding.
      causal: whether query t attends to no key after t.
      bias: added to the scaled scores.

    Returns:
      The context in the dtype of `q`. A query without any key gets zeros.

    Source: Vaswani et al. 2017, equation 1; Dao 2023; Ainslie et al. 2023 for G < H.
    """
    (batch, queries, heads, _), keys = q.shape, k.shape[1]
    if segments is None:
        segments = jnp.ones((batch, queries), jnp.int32), jnp.ones((batch, keys), jnp.int32)
    elif not isinstance(segments, tuple):
        segments = segments, segments
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    platform = mesh_platform()
    case = kernels.AttentionCase(platform, mesh_device_kind(), q.dtype, q.shape, keys, v.shape[3])
    backend = kernels.choose_backend("auto", case)
    if backend == "einsum":
        mask = segment_mask(*segments)
        mask = mask & causal_mask(queries) if causal else mask
        context = scaled_dot_product_attention(q, k, v, mask, bias=bias)[0]
    else:
        if bias is not None:
            bias = jnp.broadcast_to(bias, (len(bias), heads, queries, keys))
        options = kernels.AttentionOptions(backend, causal, 0, interpret=platform == "cpu")
        context = kernels.fused_attention(
            options, kernels.AttentionInputs(q, k, v, *segments, bias, None)
        )
    return context.swapaxes(1, 2)


def residual_norm(
    x: Float[Array, "B T D"],
    residual: Float[Array, "B T D"],
    scale: Float[Array, "D"],
    bias: Float[Array, "D"] | None = None,
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "B T D"]:
    """Computes the layer norm of `residual + x` in one kernel on NVIDIA GPUs, by XLA elsewhere.

        x, residual = jax.random.normal(jax.random.key(0), (2, 1, 5, 64))
        y = fmt.residual_norm(x, residual, scale=jnp.ones(64), bias=jnp.zeros(64))

    The kernel needs float32 or bfloat16 and a power of two of at least 128 as D; for others, XLA
    computes the norm. It is computed in float32 at least.

    Args:
      x: the output of a sub-layer.
      residual: its input.
      scale: by which the normalized values are multiplied.
      bias: added to them.
      epsilon: added to the variance.

    Returns:
      The norm, in the dtype of `residual`.

    Source: Ba et al. 2016; Vaswani et al. 2017, section 3.1.
    """
    shift = jnp.zeros_like(scale) if bias is None else bias
    width = x.shape[-1]
    has_kernel = not gpu_refusal(mesh_platform(), mesh_device_kind())
    if has_kernel and has_fused_norm(width, x.dtype):
        from flaxformer_mt.model.kernels import fused_norm

        options = fused_norm.NormOptions(epsilon, threshold=0, interpret=False, uses=1)
        inputs = fused_norm.NormInputs(residual, x, None, scale, shift, None)
        return fused_norm.residual_norm(options, inputs)[0]
    dtype = at_least_float32(x.dtype)
    rows, scale, shift = (
        array.astype(dtype) for array in ((residual + x).reshape(-1, width), scale, shift)
    )
    return layer_norm(rows, scale, shift, epsilon).reshape(x.shape).astype(residual.dtype)
