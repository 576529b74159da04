"""Parameters on their way into decoding: checked, on one device, with matrices rounded."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import LESS_ON_DEVICE, explained_exhaustion
from flaxformer_mt.model.functional import require_params


def on_one_device(params: Any) -> Any:
    """Gathers arrays that are sharded or replicated over devices on this process's first device.

    If processes share the arrays, all of them must call it. Arrays that are not copied are valid
    until the originals are donated.
    """

    def gathered(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            return leaf
        if isinstance(leaf.sharding, NamedSharding):
            everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
            return jax.device_put(leaf, everywhere).addressable_data(0)
        return jax.device_put(leaf, jax.local_devices()[0])

    return jax.tree.map(gathered, params)


def rounded_matrices(config: TransformerConfig, params: Any) -> Any:
    """Returns the parameters with their matrices in the dtype of the computation.

    The model converts them before every product anyway, so that no result changes; but a step would
    read both. Vectors stay as they are: those of norms are used in float32.
    """
    dtype = jnp.dtype(config.dtype)

    def rounded(path: Any, leaf: Any) -> Any:
        *_, module, name = ("", "", *(key.key for key in path))
        is_matrix = name == "kernel" or module in ("source_embedding", "target_embedding")
        return leaf.astype(dtype) if is_matrix and dtype.itemsize < leaf.dtype.itemsize else leaf

    return jax.tree.map_with_path(rounded, params)


def prepared_model(
    config: TransformerConfig, params: Any, tokenizers: Tokenizers, rounded: bool = True
) -> tuple[TransformerConfig, Any]:
    """Returns the configuration with vocabulary sizes, and the parameters on a device.

    A model without an encoder, and parameters that are not the model's, are a UserError.
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a TransformerConfig, not {type(config).__name__}")
    if not config.has_inputs:
        raise UserError("model.has_inputs=False: a language model has no source sentences")
    config = tokenizers.with_sizes(config)
    require_params(config, params)
    with explained_exhaustion("loading the model", LESS_ON_DEVICE):
        params = on_one_device(params)
        return config, jax.device_put(rounded_matrices(config, params) if rounded else params)
