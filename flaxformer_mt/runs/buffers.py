"""Buffers of arrays on devices, which a step that is given them may write over."""

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flaxformer_mt.errors import UserError

Tree = TypeVar("Tree")


def owned(tree: Tree) -> Tree:
    """Returns arrays in buffers that JAX has allocated, which a step can use again if it may.

    An array that was made from memory of NumPy may share it, and a step then copies the array that
    it is given. The tree is donated, leaf by leaf: buffers of JAX are returned as they are, and at
    most one array has two at a time.
    """

    def own(leaf: Any) -> Any:
        return _own(leaf.sharding)(leaf) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(own, tree)


@functools.lru_cache(256)
def _own(sharding: jax.sharding.Sharding) -> Any:
    # Not the identity: of that, JAX returns the argument itself.
    return jax.jit(jnp.copy, out_shardings=sharding, donate_argnums=0)


def require_single(donated: Iterable[tuple[str, Any]], others: Iterable[tuple[str, Any]]) -> None:
    """Raises `UserError` if a donated array shares a buffer with another array.

    Args:
      donated: names and arrays whose memory a step writes over.
      others: names and arrays that the same step reads.
    """
    names: dict[tuple[Any, int], str] = {}
    for is_donated, arrays in ((True, donated), (False, others)):
        for name, array in arrays:
            for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
                # Several arrays of JAX may hold the same buffer. All empty ones may be nowhere.
                address = _pointer(shard.data) if shard.data.nbytes else id(array)
                buffer = shard.device, address
                if buffer in names and names[buffer] != name:
                    raise UserError(
                        f"{names[buffer]} and {name} are the same array in memory, which the step "
                        "writes over: give one of them a copy (jnp.copy)"
                    )
                if is_donated:
                    names[buffer] = name


def _pointer(data: Any) -> int:
    if jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(data)
    return data.unsafe_buffer_pointer()
