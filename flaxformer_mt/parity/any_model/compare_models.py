"""Compares a PyTorch module with a JAX function that has the same weights, value by value."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.rules import TensorRule
from flaxformer_mt.parity.any_model import backward
from flaxformer_mt.parity.any_model.diagnosis import ProgramValues
from flaxformer_mt.parity.any_model.program import Program, trace
from flaxformer_mt.parity.any_model.steps import train_both
from flaxformer_mt.parity.any_model.taps import path_name
from flaxformer_mt.parity.any_model.weight_rules import (
    WeightRules,
    tensor_shapes,
    weight_rules,
)
from flaxformer_mt.parity.diagnosis.findings import Select, find
from flaxformer_mt.parity.model_pair import COMPILER_OPTIONS, precision, without_dropout
from flaxformer_mt.parity.reports.comparison import Finding, Row
from flaxformer_mt.parity.reports.report import Report
from flaxformer_mt.parity.rows import VALUES, gradient_rows, step_rows, value_row
from flaxformer_mt.parity.trace import (
    Tap,
    Values,
    comparable,
    frozen_parameters,
    parameter_gradients,
    values_of_module,
)
from flaxformer_mt.parity.trajectory import restored

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
    """Compares all named values, the outputs and the gradients of a module and a function.

    The first difference is found by the data flow of the traced function, see `program.py`.

    Args:
      torch_module: the reference, in float32 or float64; the function gets the same dtype. It runs
        in evaluation mode and is not modified.
      jax_function: a pure function of (params, *batch), from Linen, NNX, Equinox or plain JAX.
      params: the tree of its parameters, arrays or shapes.
      batch: the arguments of both sides, one array or a tuple; integers are int64 in PyTorch.
      names: where the module computes each site of the function, see `taps.tap`: a `Tap`, or the
        name of the sub-module whose output it is. By default the sites whose names are those of
        sub-modules, with slashes in place of dots.
      weights: rules from the module's tensors to the parameters, see `weight_rules.py`. By default
        their names are equal up to slashes and dots.
      weights_of: whose weights both sides get; those of the function need arrays in `params`.
      unused: parameters of the module without a counterpart; "*" stands for any part of a name.
      intermediates: whether the function returns (outputs, intermediates), whose leaves are sites.
      forward: maps (module, *tensors) to the outputs; by default `module(*tensors)`.
      loss: a scalar function of the outputs for each side, PyTorch and JAX, whose gradients are
        compared. By default a sum of the outputs with fixed factors.
      real: maps a site and its value to those rows that are compared; by default all.
      num_steps: the number of optimizer steps to compare, on the one batch.
      optimizers: for PyTorch a function of the parameters, such as
        `lambda parameters: torch.optim.Adam(parameters, 1e-3)`, and for JAX of optax.

    Returns:
      The report; `passed` is True if every row is within its tolerance.

    Raises:
      UserError: the sides cannot be compared; the message says what does not fit.
    """
    if num_steps < 0:
        raise UserError(f"num_steps={num_steps}: must be 0 or more")
    if num_steps and optimizers is None:
        raise UserError("num_steps= needs optimizers=, one for each side")
    sides = _sides(
        torch_module, jax_function, params, batch, weights, weights_of, unused, intermediates
    )
    names_of_outputs = sides.program.output_names
    losses = loss or tuple(
        functools.partial(_default_loss, library, names_of_outputs, real)
        for library in (torch, jnp)
    )
    run = functools.partial(forward or _call, torch_module, *jax.tree.map(_tensor, sides.batch))
    with precision(sides.dtype), without_dropout(torch_module), sides.weights_in_module():
        ours = _run_function(sides, loss and loss[1], real)
        taps = _taps(torch_module, names, ours.values)
        theirs = _run_module(sides, taps, names is not None, run, losses[0], ours.values)
        select = real or _everything
        rows = [*_rows(ours, theirs, sides.dtype, select)]
        findings: tuple[Finding, ...] = ()
        notes = []
        differs = not all(row.passed for row in rows)
        if differs:
            fits = {
                site: value
                for site, value in theirs.values.items()
                if value.shape == ours.values[site].shape
            }
            findings = tuple(_findings(sides, theirs._replace(values=fits), select))
        if differs and not findings and not any(row.reference_shape for row in rows):
            shapes = {site: value.shape for site, value in ours.values.items()}
            found = backward.gradients_of_function(sides.program, sides.arguments(), losses[1])
            expected = backward.gradients_of_module(
                torch_module,
                taps,
                lambda: losses[0](*_output_tensors(run(), names_of_outputs)),
                shapes,
            )
            notes = backward.first_difference(sides.program, found, expected, sides.dtype)
        steps = None
        if optimizers is not None and num_steps:
            trained, others = sides.tensors()

            def function_loss(tensors: Any) -> Any:
                values = sides.program.run(sides.leaves({**others, **tensors}))
                return losses[1](*(values[number] for number in sides.program.outputs))

            steps = train_both(
                torch_module,
                lambda: losses[0](*_output_tensors(run(), names_of_outputs)),
                optimizers[0],
                trained,
                function_loss,
                optimizers[1],
                num_steps,
                sides.dtype,
            )
            rows += step_rows(steps)
    untapped = tuple(
        site for site in ours.values if site not in {*theirs.values, *theirs.never_run}
    )
    return Report(
        type(torch_module).__name__,
        sides.dtype,
        tuple(rows),
        untapped,
        diagnosis=findings[0].diagnosis if findings else None,
        findings=findings,
        never_run=theirs.never_run,
        trajectory=steps,
        notes=(*notes, *frozen_parameters(torch_module)),
    )


def _taps(
    module: nn.Module, names: Mapping[str, Tap | str] | None, ours: Values
) -> Mapping[str, Tap | str]:
    return names if names is not None else _same_names(module, ours)


def _findings(sides: "_Sides", theirs: "_Side", select: Select) -> Iterator[Finding]:
    program = sides.program
    sites = {site.name: site.number for site in program.sites} | dict(
        zip(map(_output_site, program.output_names), program.outputs, strict=True)
    )
    values, tolerance = theirs.values, VALUES[sides.dtype]
    everything = {**values, **theirs.again}
    model = ProgramValues(program, sides.arguments(), sites, everything, select, tolerance)
    return find(model, list(sites), values, select, sides.dtype)


def _everything(site: str, value: np.ndarray) -> np.ndarray:
    return value


@dataclasses.dataclass(frozen=True)
class _Sides:
    module: nn.Module
    program: Program
    rules: WeightRules
    paths: tuple[str, ...]
    """Of the parameters, in the order of the leaves."""
    batch: tuple[Any, ...]
    """NumPy arrays."""
    dtype: str
    given: Mapping[str, np.ndarray] | None
    """The weights of the function by path, if both sides get these."""

    @contextlib.contextmanager
    def weights_in_module(self) -> Iterator[None]:
        """Gives the module the weights of the function, if wanted, until the end."""
        if self.given is None:
            yield
            return
        tensors = dict(_tensors(self.module))
        with restored(self.module):
            with torch.no_grad():
                for name, value in self.rules.to_module(self.given).items():
                    if name in tensors:
                        tensors[name].copy_(torch.tensor(value))
            yield

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Copies the trained tensors and the others, by name."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        others = {n: t for n, t in _tensors(self.module) if n not in trained}
        return _copies(trained), _copies(others)

    def arguments(self) -> list[Any]:
        """Returns the arguments of the program as they are compared."""
        trained, others = self.tensors()
        return self.leaves({**others, **trained})

    def leaves(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments of the program."""
        arrays = self.rules.to_function(tensors)
        return [*(arrays[path] for path in self.paths), *jax.tree.leaves(self.batch)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    # NumPy has no bfloat16 and no float8, which buffers may have.
    wide = {
        name: tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
        for name, tensor in tensors.items()
    }
    return {name: tensor.detach().clone().numpy() for name, tensor in wide.items()}


def _sides(
    module: nn.Module,
    function: JaxFunction,
    params: Any,
    batch: Any,
    rules: Sequence[TensorRule] | None,
    weights_of: str,
    unused: Sequence[str],
    intermediates: bool,
) -> _Sides:
    if weights_of not in ("module", "function"):
        raise UserError(f"weights_of={weights_of!r}: choose module or function")
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        found = ", ".join(sorted(dtypes)) or "no parameters"
        raise UserError(f"the module must be float32 or float64, but has {found}")
    (dtype,) = dtypes
    arguments = tuple(
        _narrowed(x, dtype) for x in (batch if isinstance(batch, tuple) else (batch,))
    )
    with precision(dtype):
        leaves = jax.tree_util.tree_flatten_with_path(params)[0]
        shapes = {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
        applied = weight_rules(
            rules,
            shapes,
            tensor_shapes(module.named_parameters()),
            tensor_shapes(module.named_buffers()),
            unused,
        )
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
        program = _program(function, *_frozen((like, arguments)), intermediates)
    given = None
    if weights_of == "function":
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for _, leaf in leaves):
            raise UserError("weights_of='function' needs arrays in params, not shapes")
        given = {path_name(path): np.asarray(leaf, dtype) for path, leaf in leaves}
    return _Sides(module, program, applied, tuple(shapes), arguments, dtype, given)


def _frozen(arguments: Any) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
    """Returns the structure of arguments, and the shapes and dtypes of their leaves."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@functools.lru_cache(maxsize=8)
def _program(function: JaxFunction, tree: Any, types: Any, intermediates: bool) -> Program:
    like = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*each) for each in types])
    return trace(function, *like, intermediates=intermediates)


def _narrowed(value: Any, dtype: str) -> Any:
    """Returns an argument as NumPy arrays of the compared dtype, or int32."""

    def narrow(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if np.issubdtype(array.dtype, np.floating):
            return array.astype(dtype)
        return array.astype(np.int32) if np.issubdtype(array.dtype, np.integer) else array

    return jax.tree.map(narrow, value)


class _Side(NamedTuple):
    """What one side computes."""

    values: Values
    """By site, in the order of computation; then the outputs."""
    loss: float
    gradients: dict[str, np.ndarray]
    """By parameter name of the module."""
    never_run: tuple[str, ...] = ()
    """Sites whose modules were never called."""
    again: Mapping[str, np.ndarray] = MappingProxyType({})
    """The values of further calls, see `ModuleValues.again`."""


def _output_site(name: str) -> str:
    return "/".join(filter(None, ("output", name)))


def _run_function(sides: _Sides, loss: Callable[..., Any] | None, real: Select | None) -> _Side:
    trained, others = sides.tensors()
    program = sides.program
    run = _compiled(program, sides.rules, sides.paths, loss, real)
    found = run(trained, others, jax.tree.leaves(sides.batch))
    (total, (values, outputs)), gradients = jax.device_get(found)
    names = [*(site.name for site in program.sites), *map(_output_site, program.output_names)]
    by_name = dict(zip(names, [*values, *outputs], strict=True))
    comparables = {site: comparable(site, value) for site, value in by_name.items()}
    return _Side(comparables, float(total), gradients)


@functools.lru_cache(maxsize=8)
def _compiled(
    program: Program,
    rules: WeightRules,
    paths: tuple[str, ...],
    loss: Callable[..., Any] | None,
    real: Select | None,
) -> Any:
    """Returns the compiled function of (trained, others, batch) to loss, values and gradients."""
    loss = loss or functools.partial(_default_loss, jnp, program.output_names, real)

    def loss_of(trained, others, batch):
        arrays = rules.to_function({**others, **trained})
        values = program.run([*(arrays[path] for path in paths), *batch])
        outputs = [values[number] for number in program.outputs]
        return loss(*outputs), ([values[site.number] for site in program.sites], outputs)

    run = jax.value_and_grad(loss_of, has_aux=True)
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


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


def _run_module(
    sides: _Sides,
    taps: Mapping[str, Tap | str],
    strict: bool,
    run: Callable[[], Any],
    loss: Callable[..., Any],
    ours: Values,
) -> _Side:
    module, expected = sides.module, [*map(_output_site, sides.program.output_names)]
    shapes = {site: value.shape for site, value in ours.items()}
    found_values = values_of_module(module, taps, lambda _: run(), shapes, strict)
    tensors = _output_tensors(found_values.output, sides.program.output_names)
    if [tuple(tensor.shape) for tensor in tensors] != [shapes[site] for site in expected]:
        theirs, wanted = _shapes(tensors), _shapes(ours[site] for site in expected)
        raise UserError(f"the module returns {theirs}, but the function {wanted}: give forward=")
    total = loss(*tensors)
    results = {
        site: comparable(site, tensor.detach().numpy())
        for site, tensor in zip(expected, tensors, strict=True)
    }
    return _Side(
        found_values.values | results,
        total.item(),
        parameter_gradients(module, total),
        found_values.never_run,
        found_values.again,
    )


def _call(module: nn.Module, *tensors: Any) -> Any:
    return module(*tensors)


def _tensor(array: np.ndarray) -> torch.Tensor:
    tensor = torch.tensor(array)
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


def _same_names(module: nn.Module, ours: Values) -> dict[str, Tap | str]:
    modules = dict(module.named_modules(remove_duplicate=False))
    return {site: name for site in ours if (name := site.replace("/", ".")) in modules}


def _output_tensors(outputs: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns the tensors that a module returns, in the order of the function's outputs."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs
    if isinstance(outputs, Mapping):
        # JAX sorts the keys of a dict. If the function returns a tuple, the order has to do.
        ordered = names if outputs.keys() == {*names} else outputs
        parts = [outputs[name] for name in ordered]
    if not isinstance(parts, Iterable):
        return []
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _shapes(arrays: Any) -> str:
    return ", ".join(str(tuple(array.shape)) for array in arrays)


def _rows(ours: _Side, theirs: _Side, dtype: str, real: Select) -> Iterator[Row]:
    for site, value in ours.values.items():
        if site in theirs.never_run:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype])
        if site not in theirs.values:
            continue
        expected = theirs.values[site]
        if expected.shape != value.shape:
            yield Row(site, value.shape, math.inf, math.inf, VALUES[dtype], expected.shape)
            continue
        yield value_row(site, real(site, value), real(site, expected), dtype)
    yield value_row("loss", np.array(ours.loss), np.array(theirs.loss), dtype)
    yield from gradient_rows(ours.gradients, theirs.gradients, dtype)
