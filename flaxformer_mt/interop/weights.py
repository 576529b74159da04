"""Carries weights between our parameters and those of a published model, in both directions.

Everything follows from a family's map (`rules.py`): what a checkpoint must contain, in which
shapes, and both conversions.

What our parameters cannot hold
-------------------------------
Some tensors of a reference have no place in our model: buffers, a second linear map that is folded
into the first, an attention that is never used. `load` leaves them in a subtree of the parameters,

    params["carried"]["<name in the reference>"]

which the model does not read. `save` gives them back, so that reference -> ours -> reference is
byte-identical. A carried tensor that no longer fits, because the weights have been trained since,
is not used: `save` then writes what is equivalent to the new weights (which is what it writes if
nothing was carried). An empty array stands for a tensor that the file left out, as its writer may
(`Family.omitted`); `save` leaves it out again. Train on `model_params(params)`, which is without
that subtree.
"""

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import checkpoint_files as files
from flaxformer_mt.interop.checkpoint_files import Checkpoint, Tensors, identical
from flaxformer_mt.interop.rules import Family, Rule
from flaxformer_mt.model.transformer import Transformer

CARRIED = "carried"

# No published code fixes these fields, or none needs them to hold its weights.
FREE_FIELDS = {
    "source_vocab_size", "target_vocab_size", "d_model", "num_heads", "head_dim", "value_dim",
    "d_ff", "num_encoder_layers", "num_decoder_layers", "dropout_rate", "embedding_dropout_rate",
    "attention_dropout_rate", "activation_dropout_rate", "max_length", "pad_id", "bos_id", "eos_id",
    "kernel_init", "embedding_init", "bias_init", "dtype", "param_dtype", "scan_layers",
}  # fmt: skip


def load(
    family: Family, source: str | os.PathLike[str] | Mapping[str, Any], overrides: dict[str, Any]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """What `interop.load` does, for a family's map."""
    with refusals_name(source, family.name):
        return from_checkpoint(family, files.read(source), overrides)


@contextlib.contextmanager
def refusals_name(source: Any, family: str) -> Iterator[None]:
    """Lets a `UserError` raised inside start with what was read, and as what."""
    try:
        yield
    except UserError as error:
        label = "the state dict" if isinstance(source, Mapping) else source
        raise UserError(f"{label} as {family}: {error}") from error


def from_checkpoint(
    family: Family, checkpoint: Checkpoint, overrides: dict[str, Any]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """The configuration, and the parameters with what they carry, of a checkpoint."""
    config = _configure(family, checkpoint, overrides)
    rules = rules_for(family, config, checkpoint.tensors)
    _check_tensors(family, rules, config, checkpoint.tensors)
    arrays = from_reference(rules, config, with_ties(rules, config, checkpoint.tensors))
    returned = to_reference(family, config, arrays, {})
    carried = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in returned or not identical(returned[name], tensor)
    }
    left_out = returned.keys() & family.omitted(config) - checkpoint.tensors.keys()
    carried |= {name: np.empty(0, config.param_dtype) for name in sorted(left_out)}
    params = unflatten_dict(arrays, sep="/")
    return config, params | {CARRIED: carried} if carried else params


def differentiable(
    family: Family, config: TransformerConfig, names: Collection[str]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What `interop.differentiable` does, for a family's map."""
    rules = rules_for(family, config, names)
    shapes = reference_shapes(rules, config)
    constants = {name: np.zeros(shapes[name], config.param_dtype) for name in family.constants}
    known = with_ties(rules, config, constants | dict.fromkeys(names))
    for name in shapes:
        if name not in known:
            raise UserError(f"tensor {name} of {family.name} is missing among the names")

    def to_ours(tensors: Mapping[str, Any]) -> dict[str, Any]:
        complete = with_ties(rules, config, constants | dict(tensors))
        return unflatten_dict(from_reference(rules, config, complete), sep="/")

    return to_ours


def save(
    family: Family,
    config: TransformerConfig,
    params: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> None:
    """What `interop.save` does without an optimizer's state, for a family's map."""
    files.write(path, to_state_dict(family, config, params))


def to_state_dict(
    family: Family, config: TransformerConfig, params: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The reference's tensors for parameters, in its own order.

    Raises:
      UserError: the configuration is not the family's, or the parameters are not the
        configuration's.
    """
    check_switches(family, config)
    arrays = by_path(params)
    check_params(config, arrays)
    carried = {name: np.asarray(array) for name, array in params.get(CARRIED, {}).items()}
    return to_reference(family, config, arrays, carried)


def by_path(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The model's parameters as numpy arrays, by path; without the subtree `carried`."""
    return {
        path: np.asarray(array)
        for path, array in flatten_dict(model_params(params), sep="/").items()
    }


def model_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that the model has: without the subtree `carried`."""
    return {name: tree for name, tree in params.items() if name != CARRIED}


def rules_for(family: Family, config: TransformerConfig, names: Collection[str]) -> list[Rule]:
    """The map of a checkpoint that has tensors of these names."""
    return family.rules(config, family.layout_of_tensors(names))


def with_ties(
    rules: Sequence[Rule], config: TransformerConfig, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """`tensors`, and those that are tied to one of them but stand there under no name of theirs."""
    complete = dict(tensors)
    for rule, _, theirs in applications(rules, config):
        present = [name for name in theirs if name in tensors]
        if rule.tied and present:
            complete |= {name: tensors[present[0]] for name in theirs if name not in tensors}
    return complete


def from_reference(
    rules: Sequence[Rule], config: TransformerConfig, tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Our arrays by path, from the reference's by name: numpy arrays, or JAX's while traced."""
    arrays: dict[str, Any] = {}
    layers = collections.defaultdict(list)
    for rule, layer, theirs in applications(rules, config):
        results = rule.to_ours(*(tensors[name] for name in theirs))
        for path, array in zip(rule.ours, results, strict=True):
            if layer is None:
                arrays[path] = array
            else:
                layers[path].append(array)
    return arrays | {
        path: slices[0].__array_namespace__().stack(slices) for path, slices in layers.items()
    }


def to_reference(
    family: Family, config: TransformerConfig, arrays: Tensors, carried: Tensors
) -> dict[str, np.ndarray]:
    """The reference's tensors by name, from ours by path.

    A carried tensor is taken where it is still consistent with `arrays`.

    Raises:
      UserError: the family has no place for one of our parameters.
    """
    tensors: dict[str, np.ndarray] = {}
    rules = family.rules(config, family.layout_of_params(arrays, carried))
    mapped = {path for rule in rules for path in rule.ours}
    for path in sorted(arrays.keys() - mapped):
        raise UserError(f"{family.name} has no place for parameter {path}")
    for path in sorted(mapped - arrays.keys()):
        raise UserError(f"{family.name} needs parameter {path}, which these have not")
    left_out = {name for name, tensor in carried.items() if not tensor.size}
    kept_tensors = {name: tensor for name, tensor in carried.items() if tensor.size}
    for rule, layer, theirs in applications(rules, config):
        ours = tuple(arrays[path] if layer is None else arrays[path][layer] for path in rule.ours)
        written = rule.to_theirs(*ours)
        kept = tuple(map(kept_tensors.get, theirs, written))
        fits = all(map(identical, rule.to_ours(*kept), ours))
        tensors.update(zip(theirs, kept if fits else written, strict=True))
    dtype = next(iter(arrays.values())).dtype
    for buffer in family.buffers(config):
        tensor = kept_tensors.get(buffer.name)
        if tensor is None or not buffer.fits(tensor):
            tensor = buffer.table(buffer.rows).astype(dtype)
        tensors[buffer.name] = tensor
    return {name: tensors[name] for name in in_order(family, tensors) if name not in left_out}


def in_order(family: Family, names: Collection[str]) -> list[str]:
    """Names sorted as PyTorch lists them: a module's own tensors, then those of its parts."""
    ranks = {part: rank for rank, part in enumerate(family.order)}

    def rank(part: str) -> int:
        return int(part) if part.isdigit() else ranks.get(part, len(ranks))

    def key(name: str) -> list[tuple[bool, int]]:
        *modules, tensor = name.split(".")
        return [*((True, rank(part)) for part in modules), (False, rank(tensor))]

    return sorted(names, key=key)


def applications(
    rules: Sequence[Rule], config: TransformerConfig
) -> Iterator[tuple[Rule, int | None, tuple[str, ...]]]:
    """Every rule with its layer (None outside of the stacks) and the names that it has there."""
    depths = {
        "encoder/layers": config.num_encoder_layers,
        "decoder/layers": config.num_decoder_layers,
    }
    for rule in rules:
        stack = "/".join(rule.ours[0].split("/")[:2])
        if stack not in depths:
            yield rule, None, rule.theirs
            continue
        for layer in range(depths[stack]):
            names = (name.format(layer=layer, number=layer + 1) for name in rule.theirs)
            yield rule, layer, tuple(names)


def _configure(
    family: Family, checkpoint: Checkpoint, overrides: dict[str, Any]
) -> TransformerConfig:
    """The configuration: what the tensors tell, then overrides, settings, preset, in that order.

    Raises:
      UserError: the number of heads is nowhere to be found, or an override or setting contradicts
        the tensors or the family.
    """
    if not checkpoint.tensors:
        raise UserError("there are no tensors in it")
    given = family.guess(checkpoint) | overrides
    if given.get("num_heads", 0) < 1:
        raise UserError("the checkpoint does not tell its number of heads: give num_heads=...")
    # One tensor of another dtype is the exception, to be refused by name later.
    dtypes = collections.Counter(tensor.dtype.name for tensor in checkpoint.tensors.values())
    dtype = dtypes.most_common(1)[0][0]
    told = {**family.sizes(checkpoint, given["num_heads"]), "param_dtype": dtype}
    for name in sorted(told.keys() & given.keys()):
        if told[name] != given[name]:
            raise UserError(
                f"{name} should be {given[name]}, but by its tensors it is {told[name]}"
            )
    config = family.configuration(**{"dtype": dtype} | given | told)
    check_switches(family, config)
    return config


def check_switches(family: Family, config: TransformerConfig) -> None:
    """Refuses a configuration that is not the family's mathematics."""
    published = family.configuration(
        **{name: getattr(config, name) for name in family.open_switches}
    )
    for field in dataclasses.fields(config):
        theirs, ours = getattr(published, field.name), getattr(config, field.name)
        if field.name not in FREE_FIELDS | family.open_switches and ours != theirs:
            raise UserError(f"{family.name} has {field.name}={theirs}, not {ours}")
    check_heads(family, config)


def check_heads(family: Family, config: TransformerConfig) -> None:
    """Refuses heads of a width that the published code cannot have."""
    width = config.d_model // config.num_heads
    evenly = family.head_widths == "rounded" or width * config.num_heads == config.d_model
    for name, ours in (("head_dim", config.key_width), ("value_dim", config.value_width)):
        if family.head_widths != "free" and not (evenly and ours == width):
            raise UserError(
                f"{family.name} has {name}=d_model/num_heads, which is "
                f"{config.d_model}/{config.num_heads}, not {ours}"
            )


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model, by path; without vocabulary, of its stacks."""
    # One layer tells the shapes of all, and no dtype matters. The model needs some vocabulary.
    model = Transformer(
        dataclasses.replace(
            config,
            source_vocab_size=max(config.source_vocab_size, 1),
            target_vocab_size=max(config.target_vocab_size, 1),
            num_encoder_layers=1,
            num_decoder_layers=1,
            dtype="float32",
            param_dtype="float32",
        )
    )
    tokens = jnp.zeros((1, 1), jnp.int32)
    variables = jax.eval_shape(
        lambda: model.init(jax.random.key(0), tokens if config.has_inputs else None, tokens)
    )
    counts = {
        ("source_embedding", "embedding"): config.source_vocab_size,
        ("target_embedding", "embedding"): config.target_vocab_size,
        ("output", "kernel"): config.target_vocab_size,
        ("output", "bias"): config.target_vocab_size,
        ("encoder", "layers"): config.num_encoder_layers,
        ("decoder", "layers"): config.num_decoder_layers,
    }
    shapes = {}
    for path, leaf in flatten_dict(variables["params"]).items():
        count = counts.get(path[:2])
        if count != 0:
            layered = path[1] == "layers"
            shapes["/".join(path)] = (count, *leaf.shape[1:]) if layered else leaf.shape
    return shapes


def reference_shapes(
    rules: Sequence[Rule], config: TransformerConfig
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the map, by name; buffers are not in it."""
    shapes: dict[str, tuple[int, ...]] = {}
    parameters = parameter_shapes(config)
    for rule, layer, theirs in applications(rules, config):
        # Zeros without memory of their own: only their shapes count.
        zeros = (
            np.broadcast_to(np.float32(0), parameters[path][layer is not None :])
            for path in rule.ours
        )
        written = rule.to_theirs(*zeros)
        shapes.update((name, a.shape) for name, a in zip(theirs, written, strict=True))
    return shapes


def _check_tensors(
    family: Family, rules: Sequence[Rule], config: TransformerConfig, tensors: Tensors
) -> None:
    """Refuses a checkpoint that has not exactly the tensors, shapes and dtype of the map."""
    shapes = reference_shapes(rules, config)
    buffers = {buffer.name: buffer for buffer in family.buffers(config)}
    # A tied tensor may be left out only if there is one that says the same.
    omitted = family.omitted(config) & (with_ties(rules, config, tensors).keys() | buffers.keys())
    for name in [*shapes, *buffers]:
        if name not in tensors and name not in omitted:
            raise UserError(f"tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes and name not in buffers:
            raise UserError(f"tensor {name} is left over: nothing in the model corresponds to it")
        if name in shapes and tensor.shape != shapes[name]:
            raise UserError(f"tensor {name} has shape {tensor.shape}, but should be {shapes[name]}")
        exact = name in shapes or buffers[name].exact
        if exact and tensor.dtype != config.param_dtype:
            raise UserError(f"tensor {name} is {tensor.dtype}, the others are {config.param_dtype}")
        if name in buffers and not buffers[name].fits(tensor):
            raise UserError(
                f"tensor {name} is not the table of d_model={config.d_model} and "
                f"position_base={config.position_base}: give position_base=... if it has another"
            )
    for rule, _, theirs in applications(rules, config):
        present = [name for name in theirs if name in tensors] if rule.tied else []
        for name in present:
            if not identical(tensors[name], tensors[present[0]]):
                raise UserError(f"{present[0]} and {name} should be tied, but differ")


def check_params(config: TransformerConfig, arrays: Tensors, what: str = "parameter") -> None:
    """Refuses arrays that are not all and only the parameters of the configuration.

    Args:
      config: what they should be the parameters of.
      arrays: by path.
      what: they are called in a message.
    """
    shapes = parameter_shapes(config)
    for path in sorted(shapes.keys() ^ arrays.keys()):
        state = "missing" if path in shapes else "left over"
        raise UserError(f"{what} {path} is {state}: these are not the parameters of the config")
    for path, array in arrays.items():
        if array.shape != shapes[path]:
            raise UserError(
                f"{what} {path} has shape {array.shape}, but should have {shapes[path]}"
            )
        if array.dtype != config.param_dtype:
            raise UserError(f"{what} {path} is {array.dtype}, but should be {config.param_dtype}")
