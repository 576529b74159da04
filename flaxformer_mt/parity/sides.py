"""Our side of a comparison and a PyTorch module with the same weights, and the values of each.

Our side is a function of the *module's* tensors: gradients are with respect to them, through ties
and folds, and an optimizer can update the same ones.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
import torch
from torch import nn

from flaxformer_mt.parity import references
from flaxformer_mt.parity.program.equations import TracedFunction
from flaxformer_mt.parity.trace import module_values
from flaxformer_mt.parity.trace.module_values import Tap, copied
from flaxformer_mt.parity.trace.sites import Values, comparable

# Compilation would dominate the run time; the results do not depend on the optimization level.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


class Side(NamedTuple):
    """The values computed by one side."""

    values: Values
    losses: Mapping[str, float] = MappingProxyType({})
    """The differentiated one is "loss"; families have one per convention, too."""
    gradients: Mapping[str, np.ndarray] = MappingProxyType({})
    never_run: tuple[str, ...] = ()
    again: Mapping[str, np.ndarray] = MappingProxyType({})
    uncertain: tuple[str, ...] = ()
    """Of a reference, as in `module_values.ModuleValues`."""

    def fitting(self, ours: Values) -> Values:
        """Returns the values that have the shape of ours."""
        return {site: v for site, v in self.values.items() if v.shape == ours[site].shape}


class Ours(Hashable, Protocol):
    """Our side, by which compiled programs are cached."""

    loss_families: ClassVar[tuple[str, ...]]
    """Families whose losses are compared, too."""

    def run(self, tensors: Mapping[str, Any], batch: Any) -> tuple[Any, Any]:
        """Computes the outputs, and the values that `by_site` takes."""

    def loss(self, outputs: Sequence[Any], batch: Any, family: str = "") -> Any:
        """Computes the loss that is differentiated, or that of a family."""

    def by_site(self, outputs: Sequence[Any], values: Any) -> Values:
        """Returns all values by site, in the order of computation; then the outputs."""


class Pair(abc.ABC):
    """Our side and a PyTorch module."""

    ours: Ours
    module: nn.Module
    dtype: str
    """That of both sides, "float32" or "float64"."""

    def trained(self) -> dict[str, np.ndarray]:
        """Copies the module's trained parameters by name, with tied ones given once."""
        return {name: copied(p) for name, p in self.module.named_parameters() if p.requires_grad}

    @abc.abstractmethod
    def fixed(self) -> dict[str, np.ndarray]:
        """Copies the module's other tensors by name."""

    @abc.abstractmethod
    def outputs(self, batch: Any) -> dict[str, torch.Tensor]:
        """Computes the module's outputs by site, differentiably."""

    @abc.abstractmethod
    def loss(
        self, outputs: Mapping[str, torch.Tensor], batch: Any, family: str = ""
    ) -> torch.Tensor:
        """Computes the module's loss, or that of a family."""

    @abc.abstractmethod
    def traced(self, batch: Any) -> tuple[TracedFunction, list[Any]]:
        """Returns our side as a traced function and its arguments."""


def run_ours(pair: Pair, batch: Any) -> Side:
    """Computes the values of our side."""
    found = _program(pair.ours)(pair.trained(), pair.fixed(), batch)
    gradients, (losses, outputs, values) = jax.device_get(found)
    losses = {name: float(loss) for name, loss in losses.items()}
    return Side(pair.ours.by_site(outputs, values), losses, gradients)


@functools.lru_cache(maxsize=8)
def _program(ours: Ours) -> Any:

    def loss_of(trained, fixed, batch):
        outputs, values = ours.run(trained | fixed, batch)
        losses = _losses(ours, ours.loss, outputs, batch)
        return losses["loss"], (losses, outputs, values)

    return jax.jit(jax.grad(loss_of, has_aux=True), compiler_options=COMPILER_OPTIONS)


def run_reference(
    pair: Pair, batch: Any, taps: Mapping[str, Tap | str], ours: Values, strict: bool
) -> Side:
    """Computes the values of the module at its taps; `strict` as for `values_of_module`."""
    shapes = {site: value.shape for site, value in ours.items()}
    run = module_values.values_of_module(
        pair.module, taps, lambda _: pair.outputs(batch), shapes, strict
    )
    losses = _losses(pair.ours, pair.loss, run.output, batch)
    outputs = {
        site: comparable(site, tensor.detach().numpy()) for site, tensor in run.output.items()
    }
    return Side(
        run.values | outputs,
        {name: loss.item() for name, loss in losses.items()},
        module_values.parameter_gradients(pair.module, losses["loss"]),
        run.never_run,
        run.again,
        run.uncertain,
    )


def _losses(ours: Ours, loss: Callable[..., Any], outputs: Any, batch: Any) -> dict[str, Any]:
    others = {f"loss/{family}": loss(outputs, batch, family) for family in ours.loss_families}
    return {"loss": loss(outputs, batch)} | others


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Sets the default precision of JAX and PyTorch."""
    with jax.enable_x64(dtype == "float64"), references.default_dtype(dtype):
        yield


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode, and restores its mode on exit."""
    was_training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in was_training.items():
            part.training = training


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restores the tensors and gradients of a module on exit."""
    # No deep copy: modules that keep a non-leaf tensor of their last call cannot be copied. No
    # load_state_dict: some publications override it.
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = {parameter: parameter.grad for parameter in module.parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
