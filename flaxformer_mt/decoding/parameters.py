"""Parameters on their way into decoding: checked, placed, with matrices rounded."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.memory_limits import LESS_ON_DEVICE, explained_exhaustion, fits_on_a_device
from flaxformer_mt.model.functional import require_params
from flaxformer_mt.training.sharding import make_mesh, shardings

Model: TypeAlias = tuple[TransformerConfig, Any]
"""A configuration and its parameters."""


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


def prepared_models(
    models: Sequence[Model], tokenizers: Tokenizers, decode: DecodeConfig, rounded: bool = True
) -> list[Model]:
    """Returns the configurations with vocabulary sizes, and the parameters on devices.

    A model without an encoder, and parameters that are not the model's, are a UserError.
    """
    complete = []
    for config, params in models:
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config must be a TransformerConfig, not {type(config).__name__}")
        if not config.has_inputs:
            raise UserError("model.has_inputs=False: a language model has no source sentences")
        if not config.has_targets:
            raise UserError("model.has_targets=False: an encoder alone does not translate")
        config = tokenizers.with_sizes(config)
        require_params(config, params)
        complete.append((config, params))
    with explained_exhaustion("loading the model", LESS_ON_DEVICE):
        return on_devices(complete, decode, rounded)


def on_devices(models: Sequence[Model], decode: DecodeConfig, rounded: bool = True) -> list[Model]:
    """Places parameters as `decode.devices_per_model` says, unless they are there.

    Raises:
      UserError: this process has fewer devices.
    """
    if rounded:
        models = [(config, rounded_matrices(config, params)) for config, params in models]
    count, given = decode.devices_per_model, DecodingMesh.of(models)
    leaves = jax.tree.leaves([params for _, params in models])
    fits = fits_on_a_device(sum(leaf.nbytes for leaf in leaves), jax.local_devices())
    if count == 1 or (fits and not count):
        return [(config, jax.device_put(on_one_device(params))) for config, params in models]
    if given is not None and count in (0, given.devices_per_model):
        mesh, rest = given.mesh, NamedSharding(given.mesh, PartitionSpec())
        kept = lambda leaf: leaf.sharding if _axes(leaf) else rest  # noqa: E731
        return [(each, jax.device_put(tree, jax.tree.map(kept, tree))) for each, tree in models]
    if given is not None and not all(leaf.is_fully_addressable for leaf in leaves if _axes(leaf)):
        raise UserError(
            f"decode.devices_per_model={count}: the parameters are sharded over devices of several "
            f"processes: give 1, which gathers them, or {given.devices_per_model}"
        )
    # Options are checked without parameters, which a run may shard over all processes.
    mesh = _new_mesh(count, decode, models, jax.local_devices() if leaves else jax.devices())
    return [(config, jax.device_put(params, shardings(params, mesh))) for config, params in models]


def _new_mesh(
    count: int, decode: DecodeConfig, models: Sequence[Model], local: Sequence[jax.Device]
) -> Mesh:
    """Returns a mesh of devices of this process, of which `count`, or all, have a whole model."""
    count = count or len(local)
    on_cpu = local[0].platform == "cpu"
    total = decode.num_devices or (count if on_cpu else max(len(local) // count, 1) * count)
    if total > len(local) or total % count:
        raise UserError(
            f"decode.devices_per_model={count} and decode.num_devices={total} do not fit the "
            f"{len(local)} devices of this process: the second has to be a multiple of the first"
        )
    heads = math.gcd(count, *(config.kv_heads for config, _ in models))
    return make_mesh(fsdp=count // heads, tensor=heads, devices=local[:total])


class DecodingMesh(NamedTuple):
    """The devices over which parameters are sharded, and how they share the work of decoding.

    Matrices stay where they are, and the few vectors of a step are sent around. The rows of a batch
    are sharded over the axes that shard no parameter, and heads of attention as their keys are.
    """

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    """From the names of axes that the model gives activations to axes of the mesh."""
    row_shards: int
    """The number of parts of a batch."""

    @property
    def devices_per_model(self) -> int:
        """The number of devices that have the parameters together."""
        return self.mesh.size // self.row_shards

    @classmethod
    def of(cls, models: Sequence[Model]) -> Self | None:
        """Returns the mesh of sharded parameters; None if no parameter is sharded."""
        leaves = jax.tree.leaves([params for _, params in models])
        sharded = [leaf for leaf in leaves if _axes(leaf)]
        if not sharded:
            return None
        mesh = sharded[0].sharding.mesh
        used = {axis for leaf in sharded for axes in _axes(leaf) for axis in axes}
        rows = tuple(axis for axis in mesh.axis_names if axis not in used)
        config, params = models[0]
        paths = flatten_dict(params, sep="/")
        table = _axes(paths["target_embedding/embedding"]) or ((), ())
        attention = "cross_attention" if config.decoder_kind == "ssru" else "self_attention"
        heads = (_axes(paths[f"decoder/layers/{attention}/key/kernel"]) or ((),))[-1]
        parts = math.prod(mesh.shape[axis] for axis in heads)
        if any(size % parts for each, _ in models for size in (each.num_heads, each.kv_heads)):
            heads = ()
        rules = {"batch": rows, "parts": table[0], "lookup_embed": table[1]}
        number = math.prod(mesh.shape[axis] for axis in rows)
        return cls(mesh, (*rules.items(), ("attention_heads", heads)), number)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Traces, and runs, programs of this thread for the mesh."""
        with (
            jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
            nn.logical_axis_rules(self.rules),
        ):
            yield


def _axes(leaf: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of a mesh over which each dimension is sharded; () if none is."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return ()
    spec = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec)
