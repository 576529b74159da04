"""Compares a PyTorch module with a JAX function that has the same weights, value by value."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import AppliedRule, TensorRule, to_ours
from flaxformer_mt.parity import driver, sides
from flaxformer_mt.parity.program.diagnosis import Select
from flaxformer_mt.parity.program.differences import ProgramValues
from flaxformer_mt.parity.program.equations import TracedFunction, trace
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.trace.module_values import Tap, copied
from flaxformer_mt.parity.trace.sites import Values, comparable
from flaxformer_mt.parity.trace.taps import leaf_name
from flaxformer_mt.parity.trajectories import TOLERANCES, Optimizers, train_both
from flaxformer_mt.parity.weight_rules import weight_rules

JaxFunction = Callable[..., Any]
ModuleForward = Callable[..., Any]


def compare_models(
    torch_module: nn.Module,
    jax_function: JaxFunction,
    params: Any,
    batch: Any,
    *,
    names: Mapping[str, Tap | str] | None = None,
    weights: Sequence[TensorRule] | None = None,
    weights_of: Literal["module", "function"] = "module",
    unused: Sequence[str] = (),
    intermediates: bool = False,
    forward: ModuleForward | None = None,
    loss: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    real: Select | None = None,
    num_steps: int = 0,
    optimizers: tuple[Callable[..., Any], optax.GradientTransformation] | None = None,
) -> Report:
    """Reports on all named values, the outputs and the gradients of a module and a function.

    Args:
      torch_module: the reference, in float32 or float64; the function gets the same dtype. It runs
        in evaluation mode and is not modified.
      jax_function: a pure function of (params, *batch), from Linen, NNX, Equinox or plain JAX.
      params: the tree of its parameters, arrays or shapes.
      batch: the arguments of both sides, one array or a tuple; integers are int64 in PyTorch.
      names: where the module computes each site of the function, see `taps.tap`: a `Tap`, or the
        name of the sub-module whose output it is. Default: sites named as sub-modules are.
      weights: rules from the module's tensors to the parameters, see `weight_rules.py`. By default
        their names are equal up to slashes and dots.
      weights_of: whose weights both sides get; those of the function need arrays in `params`.
      unused: parameters of the module without a counterpart; "*" stands for any part of a name.
      intermediates: whether the function returns (outputs, intermediates), whose leaves are sites.
      forward: maps (module, *tensors) to the outputs; by default `module(*tensors)`.
      loss: a scalar function of the outputs for each side, PyTorch and JAX. By default a sum of the
        outputs with fixed factors.
      real: maps a site and its value to those rows that are compared; by default all.
      num_steps: the number of optimizer steps to compare, on the one batch.
      optimizers: for PyTorch a function of the parameters, and for JAX of optax.

    Raises:
      UserError: the sides cannot be compared; the message says what does not fit.
    """
    if num_steps < 0:
        raise UserError(f"num_steps={num_steps}: must be 0 or more")
    if num_steps and optimizers is None:
        raise UserError("num_steps= needs optimizers=, one for each side")
    if weights_of not in ("module", "function"):
        raise UserError(f"weights_of={weights_of!r}: choose module or function")
    dtype = _dtype(torch_module)
    inputs = _narrowed(batch if isinstance(batch, tuple) else (batch,), dtype)
    with sides.precision(dtype):
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
        shapes = {path: leaf.shape for path, leaf in _by_path(like).items()}
        applied = weight_rules(weights, shapes, torch_module, unused)
        leaves, tree = jax.tree.flatten(jax.eval_shape(lambda *given: given, like, inputs))
        program = _program(jax_function, tree, tuple(leaves), intermediates)
    its_loss, our_loss = loss or (None, None)
    function = _Function(program, applied, tuple(shapes), our_loss, real)
    pair = _FunctionPair(
        function, torch_module, forward or type(torch_module).__call__, its_loss, inputs, dtype
    )
    given = _by_path(params) if weights_of == "function" else {}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in given.values()):
        raise UserError("weights_of='function' needs arrays in params, not shapes")
    arguments, select = jax.tree.leaves(inputs), real or (lambda site, value: value)
    sites = program.sites | dict(zip(function.output_sites, program.outputs, strict=True))

    def causes_of(ours: sides.Side, theirs: sides.Side) -> driver.Causes:
        # The numbers of values depend on what is opened.
        opened = _program(jax_function, tree, tuple(leaves), intermediates, opened=True)
        outputs = dict(zip(function.output_sites, opened.outputs, strict=True))
        given = function.leaves(pair.trained() | pair.fixed(), arguments)
        known = {**theirs.values, **theirs.again}
        numbers = opened.sites | outputs
        return driver.Causes(
            ProgramValues(opened, given, numbers, known, select, driver.VALUES[dtype])
        )

    train = None
    if optimizers is not None and num_steps:
        both = Optimizers(optimizers[1], optimizers[0])
        tolerance = TOLERANCES["float32" if program.narrow else dtype]
        train = functools.partial(train_both, pair, [arguments], num_steps, both, tolerance)
    with pair.with_weights(given):
        return driver.compare_pair(
            type(torch_module).__name__,
            pair,
            arguments,
            names if names is not None else _same_names(torch_module, sites),
            select,
            causes_of,
            strict=names is not None,
            train=train,
        )


@dataclasses.dataclass(frozen=True)
class _Function:
    """The JAX function, given the module's tensors and the leaves of the batch."""

    loss_families: ClassVar[tuple[str, ...]] = ()
    program: TracedFunction
    rules: tuple[AppliedRule, ...]
    paths: tuple[str, ...]
    given_loss: Callable[..., Any] | None
    real: Select | None

    def leaves(self, tensors: Mapping[str, Any], batch: Sequence[Any]) -> list[Any]:
        arrays = to_ours(self.rules, tensors)
        return [*(arrays[path] for path in self.paths), *batch]

    @property
    def output_sites(self) -> list[str]:
        return [_output_site(name) for name in self.program.output_names]

    def run(self, tensors: Mapping[str, Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = self.program.run(self.leaves(tensors, batch))
        outputs = [values[number] for number in self.program.outputs]
        return outputs, [values[number] for number in self.program.sites.values()]

    def by_site(self, outputs: Sequence[Any], values: Sequence[Any]) -> Values:
        found = dict(
            zip([*self.program.sites, *self.output_sites], [*values, *outputs], strict=True)
        )
        return {site: comparable(site, value) for site, value in found.items()}

    def loss(self, outputs: Sequence[Any], batch: Sequence[Any], family: str = "") -> Any:
        if self.given_loss:
            return self.given_loss(*outputs)
        return _default_loss(jnp, self.program.output_names, self.real, *outputs)


@dataclasses.dataclass(frozen=True)
class _FunctionPair(sides.Pair):
    """A JAX function and a PyTorch module; batches are lists of the leaves of the arguments."""

    ours: _Function
    module: nn.Module
    forward: ModuleForward
    given_loss: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    dtype: str

    @contextlib.contextmanager
    def with_weights(self, given: Mapping[str, Any]) -> Iterator[None]:
        tensors = dict(_tensors(self.module)) if given else {}
        arrays = {path: np.asarray(leaf, self.dtype) for path, leaf in given.items()}
        rules = self.ours.rules if given else ()
        found = {name: tensor for rule in rules for name, tensor in rule.written(arrays)}
        with sides.restored(self.module) if given else contextlib.nullcontext():
            with torch.no_grad():
                for name in found.keys() & tensors.keys():
                    tensors[name].copy_(torch.tensor(found[name]))
            yield

    def fixed(self) -> dict[str, np.ndarray]:
        trained = self.trained()
        return {n: copied(t) for n, t in _tensors(self.module) if n not in trained}

    def outputs(self, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
        program = self.ours.program
        arguments = jax.tree.unflatten(jax.tree.structure(self.inputs), map(_tensor, batch))
        tensors = _output_tensors(self.forward(self.module, *arguments), program.output_names)
        expected = [program.types[number] for number in program.outputs]
        if _shapes(tensors) != _shapes(expected):
            raise UserError(
                f"the module returns {', '.join(_shapes(tensors))}, but the function "
                f"{', '.join(_shapes(expected))}: give forward="
            )
        return dict(zip(self.ours.output_sites, tensors, strict=True))

    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Sequence[Any], family: str = ""
    ) -> torch.Tensor:
        if self.given_loss:
            return self.given_loss(*outputs.values())
        names = self.ours.program.output_names
        return _default_loss(torch, names, self.ours.real, *outputs.values())

    def traced(self, batch: Sequence[Any]) -> tuple[TracedFunction, list[Any]]:
        return self.ours.program, self.ours.leaves(self.trained() | self.fixed(), batch)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _dtype(module: nn.Module) -> str:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        found = ", ".join(sorted(dtypes)) or "no parameters"
        raise UserError(f"the module must be float32 or float64, but has {found}")
    return dtypes.pop()


def _by_path(tree: Any) -> dict[str, Any]:
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@functools.lru_cache(maxsize=8)
def _program(
    function: JaxFunction, tree: Any, leaves: Any, intermediates: bool, opened: bool = False
) -> TracedFunction:
    given = jax.tree.unflatten(tree, leaves)
    return trace(function, *given, intermediates=intermediates, opened=opened)


def _narrowed(value: Any, dtype: str) -> Any:

    def narrow(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if np.issubdtype(array.dtype, np.floating):
            return array.astype(dtype)
        return array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array

    return jax.tree.map(narrow, value)


def _output_site(name: str) -> str:
    return "/".join(filter(None, ("output", name)))


def _default_loss(library: Any, names: Sequence[str], real: Select | None, *outputs: Any) -> Any:
    """Returns the sum of all floating outputs with fixed factors of 0.5 to 1.5."""
    total = 0.0
    for name, output in zip(names, outputs, strict=True):
        size = int(np.prod(output.shape))
        factors = 1 + np.cos(np.arange(size)).reshape(tuple(output.shape)) / 2
        if real is not None:
            rows = real(_output_site(name), np.arange(size).reshape(factors.shape))
            factors = np.where(np.isin(np.arange(size), rows).reshape(factors.shape), factors, 0)
        constant = library.asarray(factors, dtype=output.dtype)
        total = total + (output * constant).sum() / size
    return total


def _tensor(array: np.ndarray) -> torch.Tensor:
    tensor = torch.tensor(array)
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def _same_names(module: nn.Module, ours: Iterable[str]) -> dict[str, Tap | str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    return {site: name for site in ours if (name := site.replace("/", ".")) in modules}


def _output_tensors(outputs: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns the tensors that a module returns, in the order of the function's outputs."""
    parts = outputs
    if isinstance(outputs, Mapping):
        # JAX sorts the keys of a dict. If the function returns a tuple, the order has to do.
        ordered = names if outputs.keys() == {*names} else outputs
        parts = [outputs[name] for name in ordered]
    if isinstance(outputs, torch.Tensor) or not isinstance(parts, Iterable):
        parts = [outputs]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _shapes(arrays: Sequence[Any]) -> list[str]:
    return [str(tuple(array.shape)) for array in arrays]
