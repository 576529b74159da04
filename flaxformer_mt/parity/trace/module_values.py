"""Captures values inside of a PyTorch module: of sub-modules, and of operations between them.

They come from hooks, and from a dispatch mode for operations. The module need not be modified.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.trace.sites import Values, comparable

Reshape = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


class Tap(NamedTuple):
    """Where a PyTorch module computes the value of a site."""

    module: str
    """The dotted name of a sub-module; "" is the module itself. "{layer}" is a layer index."""
    side: Literal["output", "input"] = "output"
    """Whether to capture the output or an input of the module (or operation)."""
    op: str = ""
    """An ATen operation, such as "_softmax", that the module runs itself or, failing that, in its
    sub-modules; "" = the module as a whole."""
    call: int = 0
    """The index of the call; -1 is the last. A shared module has one count for all its names."""
    argument: int = 0
    """The index of the input or output, if there are several."""
    reshape: Reshape | None = None
    """A function of (value, shape of the site). By default [T, B, D] is transposed, and merged
    leading axes, such as [B*H, T, S], are split. Where B = T, `compare` takes the layout that
    agrees."""
    is_by_head: bool = False
    """Whether several calls are those of the heads: they are stacked along a new axis 1."""


def softmax_input(module: str, call: int = 0) -> Tap:
    """Returns the tap of attention scores."""
    return Tap(module, "input", "_softmax", call)


def softmax_output(module: str, call: int = 0) -> Tap:
    """Returns the tap of attention weights."""
    return Tap(module, "output", "_softmax", call)


def time_major(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts [T, B, D] or [T*B, D] to [B, T, D]; keeps [B, T, D] unless B = T."""
    batch, length, width = shape
    if value.shape == shape != (length, batch, width):
        return value
    return value.reshape(length, batch, width).swapaxes(0, 1)


def for_layers(num_layers: int, taps: Mapping[str, Tap | str]) -> dict[str, Tap]:
    """Repeats `taps`, or names of modules, for every layer.

    In sites and modules, "{layer}" is the layer from 0 and "{number}" that from 1; multiples and
    sums, such as "{2*layer+1}", are allowed.
    """
    return {
        _of_layer(site, layer): tap._replace(module=_of_layer(tap.module, layer))
        for layer in range(num_layers)
        for site, tap in as_taps(taps).items()
    }


def as_taps(taps: Mapping[str, Tap | str]) -> dict[str, Tap]:
    """Returns the taps, in which a name stands for the output of a module."""
    return {site: Tap(tap) if isinstance(tap, str) else tap for site, tap in taps.items()}


def _of_layer(name: str, layer: int) -> str:

    def replaced(found: re.Match[str]) -> str:
        terms = re.fullmatch(r"(?:(\d+)\*)?(layer|number)([+-]\d+)?", found[1].replace(" ", ""))
        if terms is None:
            raise UserError(f"{name}: {found[0]} must be such as {{layer}} or {{2*layer+1}}")
        factor, variable, added = terms.groups(default="")
        start = layer + (variable == "number")
        return str(int(factor or 1) * start + int(added or 0))

    return re.sub(r"\{([^{}]*)\}", replaced, name)


Key: TypeAlias = tuple[nn.Module, str, str]
"""A module, an operation of it or "", and the side."""


@dataclasses.dataclass(frozen=True)
class Calls:
    """The inputs or outputs of every call, by key."""

    own: dict[Key, list[list[Any]]]
    of_parts: dict[Key, list[list[Any]]]
    """Of operations that sub-modules run."""

    def __getitem__(self, key: Key) -> list[list[Any]]:
        return self.own[key] or self.of_parts[key]


class ModuleValues(NamedTuple):
    """What a run of a module computes."""

    output: Any
    values: Values
    never_run: tuple[str, ...]
    """Sites whose modules were never called."""
    again: Values
    """By "site#1", "site#2" ...: the outputs of further calls of the tapped modules."""
    uncertain: tuple[str, ...] = ()
    """Sites whose tap may not fit: of another shape, split by an assumption, or of a sub-module."""


def values_of_module(
    module: nn.Module,
    taps: Mapping[str, Tap | str],
    call: Callable[[nn.Module], Any],
    shapes: Mapping[str, tuple[int, ...]],
    strict: bool = True,
) -> ModuleValues:
    """Runs a module by `call` and captures the values of its taps.

    `shapes` has the shape of every site, in order. If `strict`, a tap that does not fit the module
    raises UserError; otherwise its site is omitted, or a value of another shape is kept.
    """
    wanted = as_taps(taps)
    modules = dict(module.named_modules(remove_duplicate=False))
    if not strict:
        wanted = {site: tap for site, tap in wanted.items() if tap.module in modules}
    for site, tap in wanted.items():
        if site not in shapes:
            raise UserError(f"there is no site {site}; the first is {next(iter(shapes))}")
        if tap.module not in modules:
            raise UserError(f"tap of {site}: the module has no sub-module {tap.module!r}")
    keys = {site: (modules[tap.module], tap.op, tap.side) for site, tap in wanted.items()}
    outputs = {(part, "", "output") for part, *_ in keys.values()}
    with recording(module, {*keys.values(), *outputs}) as seen:
        output = call(module)
    found: Values = {}
    never_run, uncertain = [], []
    run_elsewhere = {key[1:] for key in seen.own if seen[key]}
    for site in (site for site in shapes if site in wanted):
        key, tap, shape = keys[site], wanted[site], shapes[site]
        skipped = key[0] is not module and _is_callable(key[0]) and not seen[key[0], "", "output"]
        if skipped or (not seen[key] and key[1:] in run_elsewhere):
            never_run.append(site)
            continue
        try:
            value = _tapped(site, tap, seen[key])
        except UserError:
            if strict:
                raise
            continue
        is_split = tap.reshape is None and value.ndim < len(shape)
        with contextlib.nullcontext() if strict else contextlib.suppress(UserError):
            value = shaped(site, tap.reshape, value, shape)
        if is_split or value.shape != shape or not seen.own[key]:
            uncertain.append(site)
        found[site] = comparable(site, value)
    again = dict(_further_calls(wanted, keys, seen, shapes))
    return ModuleValues(output, found, tuple(never_run), again, tuple(uncertain))


def frozen_parameters(module: nn.Module) -> list[str]:
    """Returns the note on parameters that are not trained, if there are any."""
    names = [name for name, p in module.named_parameters() if not p.requires_grad]
    if not names:
        return []
    return [
        f"Not compared: the gradients of {len(names)} frozen parameters (requires_grad=False), the "
        f"first is {names[0]}."
    ]


def parameter_gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns a loss's gradients by the name of the trained parameter, 0 where it is unused."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise UserError("all parameters of the module are frozen: call module.requires_grad_()")
    if not loss.requires_grad:
        raise UserError(
            "the loss does not depend on the module's parameters by a differentiable path: its "
            "outputs are detached, integers, or were computed under torch.no_grad"
        )
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return {name: gradient.numpy() for name, gradient in zip(parameters, found, strict=True)}


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _further_calls(
    taps: Mapping[str, Tap],
    keys: Mapping[str, Key],
    seen: Calls,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, np.ndarray]]:
    denoted = {(keys[site], tap.call % max(len(seen[keys[site]]), 1)) for site, tap in taps.items()}
    for site, tap in taps.items():
        if tap.is_by_head:
            continue
        for index, values in enumerate(seen[keys[site]]):
            whole = not tap.op and tap.side == "output" and len(values) > tap.argument
            if whole and (keys[site], index) not in denoted:
                value = values[tap.argument]
                if isinstance(value, np.ndarray) and value.shape == shapes[site]:
                    yield f"{site}#{index}", value


def _tapped(site: str, tap: Tap, calls: list[list[Any]]) -> np.ndarray:
    what = f"operation {tap.op} of module" if tap.op else "module"
    if not -len(calls) <= tap.call < len(calls):
        raise UserError(
            f"tap of {site}: {what} {tap.module!r} was called {len(calls)} times, "
            f"and there is no call {tap.call}"
        )
    if tap.is_by_head and len(calls) > 1:
        heads = [_tapped(site, tap._replace(is_by_head=False), [call]) for call in calls]
        return np.stack(heads, axis=1)
    values = calls[tap.call]
    if not 0 <= tap.argument < len(values) or not isinstance(values[tap.argument], np.ndarray):
        raise UserError(f"tap of {site}: {tap.side} {tap.argument} of {what} is not a tensor")
    return values[tap.argument]


def shaped(
    site: str, reshape: Reshape | None, value: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns a value in the shape of its site, see `Tap.reshape`; or raises UserError."""
    misfit = UserError(f"{site} has shape {value.shape} in the reference, but {shape} here")
    if reshape is not None:
        try:
            value = reshape(value, shape)
        except ValueError as error:
            raise misfit from error
    elif len(shape) == 3 and value.shape == (shape[1], shape[0], shape[2]) != shape:
        value = value.swapaxes(0, 1)  # Time-major: [T, B, D].
    merged = value.ndim < len(shape) and value.size == np.prod(shape)
    if value.shape != shape and not merged:
        raise misfit
    return value.reshape(shape)


@contextlib.contextmanager
def recording(root: nn.Module, wanted: Set[Key], copy: bool = True) -> Iterator[Calls]:
    """Records the given modules and operations; tensors as NumPy arrays unless `copy` is False."""
    seen = Calls({key: [] for key in wanted}, {key: [] for key in wanted})
    running = [root]
    handles = []

    def record(module: nn.Module, op: str, side: str, values: Any, kept: Any = seen.own) -> None:
        if (module, op, side) in kept:
            values = values if isinstance(values, tuple) else (values,)
            kept[module, op, side].append([_copied(value) if copy else value for value in values])

    def enter(module, args, kwargs):
        running.append(module)
        record(module, "", "input", (*args, *kwargs.values()))

    def leave(module, args, output):
        running.pop()
        record(module, "", "output", output)

    def record_operation(name: str, side: str, values: Any) -> None:
        record(running[-1], name, side, values)
        for module in {*running} - {running[-1]}:
            record(module, name, side, values, seen.of_parts)

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # In-place and safe variants compute the same: "mul_", "_safe_softmax".
            name = func.overloadpacket.__name__.removesuffix("_").replace("_safe_", "_")
            factors = args
            if name == "baddbmm":  # A product, to which a mask is added.
                name, factors = "bmm", args[1:]
            record_operation(name, "input", factors)  # Before they are modified in place.
            output = func(*args, **kwargs or {})
            record_operation(name, "output", output)
            return output

    try:
        for module in root.modules():
            handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            ]
            if isinstance(module, nn.MultiheadAttention):
                handles.append(module.register_forward_pre_hook(request_weights, with_kwargs=True))
        # PyTorch's fused attention does not expose scores and weights.
        with Operations(), sdpa_kernel(SDPBackend.MATH):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def request_weights(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that makes PyTorch's attention compute the weights of every head."""
    return args, kwargs | {"need_weights": True, "average_attn_weights": False}


def copied(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor."""
    # NumPy has no bfloat16 and no float8, which buffers may have.
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if narrow else tensor).detach().clone().numpy()


def _copied(value: Any) -> Any:
    return copied(value) if isinstance(value, torch.Tensor) else value
