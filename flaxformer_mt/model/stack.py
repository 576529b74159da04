"""Stacks of L layers with one parameter layout, run as a loop or unrolled."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.extend.core import Primitive

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.model.kernels.fused_attention import is_fused_attention
from flaxformer_mt.model.logical_axes import mesh_platform

LOSSES = "losses"
"""The collection of what layers add to the objective."""


def stack(
    layer: type[nn.Module],
    config: TransformerConfig,
    num_layers: int,
    methods: dict[str, Any],
) -> Any:
    """Creates a module that applies `layer` `num_layers` times, each with its own parameters.

    Parameters have a leading axis L. `config.scan_layers` chooses between one compiled loop body
    (`lax.scan`) and L copies of it; parameters are the same, and results up to rounding. On CPUs
    the loop is the default, because it compiles faster and its steps are no slower: with 6 + 6
    layers of width 256 on two CPU cores it took 13 s instead of 39 s to compile a training step and
    0.91 of the time to run it (`benchmarks/layer_stack.py`). GPUs and TPUs would spend a quarter of
    a step on copying what the loop keeps for the backward pass into and out of stacked arrays.

    `config.remat` selects which activations are computed again in the backward pass instead of
    stored (Chen et al. 2016); inputs of layers are always stored. "products" and "full" are applied
    here, "projections" in `MultiHeadAttention`.

    The layer's methods map (carry, *arguments) to (carry, output); outputs are stacked along L.
    `methods` says for each method, whether each argument has the axis L (0) or is the same for all
    layers (`nn.broadcast`).
    """
    is_loop = mesh_platform() == "cpu" if config.scan_layers == "auto" else config.scan_layers
    with _CREATING_CLASSES:
        if config.remat in _POLICIES:
            # Python bools are traced unless they are declared static.
            names = list(inspect.signature(layer.__call__).parameters)
            flags = tuple(names.index(name) for name in ("deterministic", "return_attention"))
            # In unrolled layers, XLA would merge the second computation with the first.
            layer = nn.remat(
                layer,
                prevent_cse=not is_loop,
                static_argnums=flags,
                policy=_POLICIES[config.remat],
                methods=["__call__"],
            )
        transformed = nn.scan(
            layer,
            methods={
                name: {
                    # "intermediates" are read by the comparison with published models; otherwise
                    # the collection is not requested, and nothing is stored.
                    "variable_axes": {"params": 0, "intermediates": 0, LOSSES: 0},
                    "split_rngs": {"params": True, "dropout": True},
                    "in_axes": in_axes,
                    "length": num_layers,
                    "unroll": 1 if is_loop else max(num_layers, 1),
                }
                for name, in_axes in methods.items()
            },
        )
    return transformed(config)


# Flax removes fields of a layer's class while it makes a class of the transformed layer, and puts
# them back afterwards. Several threads trace at once when they translate.
_CREATING_CLASSES = threading.Lock()


def _is_product(primitive: Primitive, *_: Any, **params: Any) -> bool:
    if primitive.name == "dot_general":
        _, batch_axes = params["dimension_numbers"]
        return batch_axes == ((), ())
    return is_fused_attention(primitive, **params)


_POLICIES: dict[str, Callable[..., bool] | None] = {"products": _is_product, "full": None}


def layer_variables(layers: nn.Module, num_layers: int) -> list[Any]:
    """Returns the variables of each layer of a bound `stack`, without the axis L."""
    _, stacked = layers.unbind()
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_layers)]
