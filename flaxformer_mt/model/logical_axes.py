"""The mesh as the model sees it: its platform, and the names of the axes that it shards."""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flaxformer_mt.errors import UserError


def mesh_platform() -> str:
    """Returns the platform that is being compiled for: "cpu", "gpu" or "tpu".

    It is that of the mesh in use (`jax.sharding.use_abstract_mesh`), whose devices need not be
    those of this process; without a mesh, that of the device that is JAX's default.
    """
    return _mesh_device().platform


def mesh_device_kind() -> str:
    """Returns what the devices that are being compiled for call themselves; see `mesh_platform`."""
    return _mesh_device().device_kind


def _mesh_device() -> Any:
    """Returns a device, or the description of one."""
    config: Any = jax.config
    device = jax.sharding.get_abstract_mesh().abstract_device or config.jax_default_device
    if device is None or isinstance(device, str):  # The name of a platform.
        return jax.local_devices(backend=device)[0]
    return device


def constrain(x: Array, *axes: str) -> Array:
    """Names the axes of an activation, so that it is sharded by the rules of its mesh.

    The rules are those of `flax.linen.logical_axis_rules`, the mesh is the abstract mesh in use
    (`jax.sharding.use_abstract_mesh`). An axis without a rule, or whose size the mesh axes do not
    divide, is left to XLA. Without rules, without a mesh, or on a device that sees only its own
    rows (`jax.pmap`, `jax.shard_map`), the result is `x` itself.

    The model uses these names: "batch", "length", "embed" (D), "heads" (H*K or H*U), "hidden" (F),
    "vocabulary" (V), and "lookup_batch" and "lookup_embed" for vectors as a sharded table gives
    them. "attention_heads" (H) is for fused attention, and "parts" for the parts of a matrix or
    table that is divided among devices.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} logical axes {axes} for an array of shape {x.shape}")
    mesh = mesh_of_rules()
    if mesh is None:
        return x
    spec = PartitionSpec(
        *(
            dividing_axes(name, size) or PartitionSpec.UNCONSTRAINED
            for name, size in zip(axes, x.shape, strict=True)
        )
    )
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def mesh_of_rules() -> AbstractMesh | None:
    """Returns the mesh in use if rules say how it shards activations, otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if nn.get_logical_axis_rules() and mesh.auto_axes else None


def on_each_device(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Lets each device run a function on its part of arrays, by partition specs.

    XLA would gather the whole arrays on every device for a kernel, which it cannot partition.
    Without rules or without a mesh, the result is `function` itself.
    """
    mesh = mesh_of_rules()
    if mesh is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.auto_axes),
        check_vma=False,
    )


def _mesh_axes(name: str) -> dict[str, int]:
    """Returns the axes of the mesh that the rules give a logical axis, with their sizes."""
    mesh = mesh_of_rules()
    if mesh is None:
        return {}
    rule = dict(nn.get_logical_axis_rules()).get(name) or ()
    names = (rule,) if isinstance(rule, str) else rule
    return {axis: mesh.shape[axis] for axis in names if axis in mesh.auto_axes}


def dividing_axes(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that the rules give a logical axis; none if they do not divide it."""
    found = _mesh_axes(name)
    return () if size % math.prod(found.values()) else tuple(found)


def num_parts(name: str, size: int) -> int:
    """Returns into how many parts the rules divide an axis."""
    parts = math.prod(_mesh_axes(name).values())
    return 1 if size % parts else parts


def require_even_parts(name: str, size: int, option: str) -> None:
    """Raises UserError if devices would compute parts of a head: the mesh axes do not divide it.

    `option` is the option that determines the size.
    """
    found = _mesh_axes(name)
    require_divisor(math.prod(found.values()), size, option, ", ".join(found))


def require_divisor(parts: int, size: int, option: str, axes: str) -> None:
    """Raises UserError unless a number of devices, those of some mesh axes, divides a size."""
    if size % parts:
        raise UserError(
            f"{option}={size} cannot be divided evenly among {parts} devices of the mesh axis "
            f"{axes}: choose a divisor of {size}"
        )
