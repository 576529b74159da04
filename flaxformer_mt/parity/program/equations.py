"""A JAX function as a flat list of equations, in which the values of sites can be replaced.

The equations are those of the jaxpr, with nested functions inlined and loops over layers unrolled.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.trace.taps import leaf_name

_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "call_jaxpr",
}
"""Primitives that are replaced by their bodies, and the parameter that holds the body."""
_CUSTOM = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Those with a derivative of their own, which a program that is differentiated keeps unless they
contain a tap."""


RESHAPING = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "slice",
    "convert_element_type",
    "copy",
    "copy_p",
    "stop_gradient",
    "expand_dims",
    "mask",
)
"""Primitives that only move numbers."""


class Equation(NamedTuple):
    """One primitive operation."""

    name: str
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[..., Sequence[Any]]


class Norm(NamedTuple):
    """A site that is a norm of another value."""

    site: str
    number: int
    reads: int
    equations: Sequence[Equation]


@dataclasses.dataclass(eq=False)
class TracedFunction:
    """A traced function; values have numbers."""

    equations: list[Equation] = dataclasses.field(default_factory=list)
    inputs: Sequence[int] = ()
    """One number for each leaf of the parameters, then of the other arguments."""
    outputs: Sequence[int] = ()
    output_names: Sequence[str] = ()
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    sites: dict[str, int] = dataclasses.field(default_factory=dict)
    """In the order of computation."""
    parameters: dict[int, str] = dataclasses.field(default_factory=dict)
    """Paths of the parameters, and of the layers of stacked ones."""
    types: dict[int, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    stacks: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """The values of the iterations of a loop, by the number of their stack."""
    opened: bool = False

    def run(self, leaves: Sequence[Any], added: Mapping[int, Any] = MappingProxyType({})) -> Any:
        """Computes all values by number, from the leaves of the arguments.

        `added` is added to values.
        """
        values = {**self.constants, **dict(zip(self.inputs, leaves, strict=True))}
        for equation in self.equations:
            outputs = equation.run(*(values[number] for number in equation.inputs))
            values.update(zip(equation.outputs, outputs, strict=True))
            values.update({n: values[n] + added[n] for n in equation.outputs if n in added})
        return values

    def with_sites(self, numbers: Mapping[str, int], outputs: Sequence[str]) -> "TracedFunction":
        """Returns the program with the values of other sites, and some of its outputs."""
        order = [number for equation in self.equations for number in equation.outputs]
        position = {number: index for index, number in enumerate(order, 1)}
        kept = dict(zip(self.output_names, self.outputs, strict=True))
        return dataclasses.replace(
            self,
            outputs=tuple(kept[name] for name in outputs),
            output_names=tuple(outputs),
            sites=dict(sorted(numbers.items(), key=lambda site: position.get(site[1], 0))),
        )

    @functools.cached_property
    def norms(self) -> list["Norm"]:
        """The sites that are norms of another value."""
        fixed = {*self.inputs, *self.constants, *self.parameters}
        numbers, found = {*self.sites.values()}, []
        for site, number in self.sites.items():
            equations = self.slice_before(number, fixed | numbers - {number})
            names = {equation.name for equation in equations}
            if not names & {"sqrt", "rsqrt"} or names & {"dot_general", "gather"}:
                continue
            made = {n for equation in equations for n in equation.outputs}
            read = {n for equation in equations for n in equation.inputs} - made - fixed
            if len(read) == 1 and self.types[min(read)].shape == self.types[number].shape:
                found.append(Norm(site, number, min(read), equations))
        return found

    @functools.cached_property
    def data(self) -> set[int]:
        """The values that depend on what the model is given, not on parameters alone."""
        return self._reached_from(set(self.inputs) - set(self.parameters))

    @functools.cached_property
    def drawn(self) -> set[int]:
        """Random numbers, and what is computed from them alone."""
        random = {n for e in self.equations if e.name.startswith("random_") for n in e.outputs}
        return self._reached_from(random) - self.data

    @functools.cached_property
    def narrow(self) -> set[int]:
        """The values that depend on numbers of less than 64 bits."""
        return self._reached_from(self.rounded)

    @functools.cached_property
    def rounded(self) -> set[int]:
        """The floating values of less than 64 bits, other than random numbers."""
        return {
            number
            for number, like in self.types.items()
            if number not in self.drawn
            and jnp.issubdtype(like.dtype, jnp.floating)
            and like.dtype.itemsize < 8
            and (like.shape or number not in self.constants)
        }

    def _reached_from(self, start: set[int]) -> set[int]:
        found = set(start)
        for equation in self.equations:
            if found.intersection(equation.inputs):
                found.update(equation.outputs)
        return found

    @functools.cached_property
    def producers(self) -> dict[int, Equation]:
        """The equation that computes each value."""
        return {number: equation for equation in self.equations for number in equation.outputs}

    def looked_up(self, number: int) -> str:
        """Returns "positions" or "embedding" for rows of a table, moved and scaled; else ""."""
        equation = self.producers.get(number)
        while equation is not None and equation.name in (*RESHAPING, "mul", "div", "select_n"):
            start = int(equation.name == "select_n")  # Its first input is the condition.
            varying = [n for n in equation.inputs[start:] if not self._is_scalar(n)]
            equation = self.producers.get(varying[0]) if len(varying) == 1 else None
        if equation is None or equation.name != "gather":
            return ""
        table = self._origin(equation.inputs[0])
        path = self.parameters.get(table, "positions" if table in self.constants else "")
        is_of_tokens = equation.inputs[1] in self.data and "pos" not in path.lower()
        return "embedding" if is_of_tokens else "positions"

    def _is_scalar(self, number: int) -> bool:
        return np.size(self.constants.get(self._origin(number), (0, 0))) == 1

    def _origin(self, number: int) -> int:
        while number in self.producers and self.producers[number].name in RESHAPING:
            number = self.producers[number].inputs[0]
        return number

    def is_norm_of(self, site: str, other: str) -> bool:
        """Whether a site is a norm of another one."""
        return any(n.site == site and n.reads == self.sites.get(other) for n in self.norms)

    def depends(self, number: int, on: int) -> bool:
        """Whether a value is computed from another one."""
        wanted = {number}
        for equation in reversed(self.equations):
            if wanted.intersection(equation.outputs):
                wanted.update(equation.inputs)
        return on in wanted

    def slice_before(self, number: int, known: Iterable[int]) -> list[Equation]:
        """Returns the equations that compute a value from `known` ones, in order."""
        stop, wanted, found = set(known), {number}, []
        for equation in reversed(self.equations):
            if wanted.intersection(equation.outputs):
                found.append(equation)
                wanted.update(set(equation.inputs) - stop)
        return found[::-1]


def trace(
    function: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    *,
    intermediates: bool = False,
    opened: bool = False,
) -> TracedFunction:
    """Traces function(params, *args), whose arguments are trees of arrays or shapes.

    With `intermediates`, it returns (outputs, intermediates), and each leaf of these is a site.
    With `opened`, functions that have a derivative of their own become equations, too, and lose it.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *args)
    builder = _Builder(opened=opened)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    inputs = [builder.new(var.aval) for var in closed.jaxpr.invars]
    builder.parameters = {
        number: leaf_name(path) for number, (path, _) in zip(inputs, leaves, strict=False)
    }
    outputs = builder.inline(closed.jaxpr, closed.consts, inputs, "")
    results = jax.tree_util.tree_leaves_with_path(shape)
    named = [(leaf_name(path), n) for (path, _), n in zip(results, outputs, strict=True)]
    if intermediates:
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise UserError("the function must return (outputs, intermediates)")
        for name, number in named:
            site = intermediate_name(name.removeprefix("1/")) if name.startswith("1/") else ""
            if site:  # That of the whole module is the output.
                builder.add_site(site, number)
        named = [(name[2:], n) for name, n in named if name.split("/")[0] == "0"]
    builder.inputs = inputs
    builder.output_names, builder.outputs = zip(*named, strict=True) if named else ((), ())
    return builder.with_sites(builder.sites, builder.output_names)


def intermediate_name(path: str) -> str:
    """Returns the site of an intermediate: of Linen's and NNX's tuples of calls, "a", "a#1" ..."""
    # Linen and NNX collect the calls of a module in tuples: "intermediates/a/__call__/0" and
    # "a/__call__/value/0" are "a", and a second call is "a#1". Other paths are kept.
    found = re.fullmatch(r"intermediates/(.*)/(\d+)|(?:(.*)/|)value/(\d+)", path)
    if found is None:
        return path
    call = found[2] or found[4]
    name = re.sub("(^|/)__call__$", "", found[1] or found[3] or "")
    return name if call == "0" else f"{name}#{call}"


class _Builder(TracedFunction):
    def new(self, like: Any) -> int:
        if _is_key(like):
            like = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
        self.types[len(self.types)] = jax.ShapeDtypeStruct(like.shape, like.dtype)
        return len(self.types) - 1

    def constant(self, value: Any) -> int:
        like = jax.typeof(value)
        number = self.new(like)
        self.constants[number] = jax.random.key_data(value) if _is_key(like) else value
        return number

    def add_site(self, name: str, number: int) -> None:
        count = sum(other.split("#")[0] == name for other in self.sites)
        self.sites[f"{name}#{count}" if count else name] = number

    def add(self, eqn: Any, inputs: Sequence[int]) -> list[int]:
        outputs = tuple(self.new(var.aval) for var in eqn.outvars)
        name = eqn.primitive.name
        self.equations.append(Equation(name, eqn.params, tuple(inputs), outputs, _alone(eqn)))
        return list(outputs)

    def inline(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], layer: str) -> Any:
        """Adds the equations of a jaxpr, and returns the numbers of its outputs."""
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {var: self.constant(c) for var, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(var: Any) -> int:
            return self.constant(var.val) if isinstance(var, core.Literal) else numbers[var]

        for eqn in jaxpr.eqns:
            outputs = self.expand(eqn, [read(var) for var in eqn.invars], layer)
            numbers.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def expand(self, eqn: Any, inputs: list[int], layer: str) -> list[int]:
        name = eqn.primitive.name
        if name == "name":
            site = eqn.params["name"].replace("{layer}", layer)
            self.add_site(site, inputs[0])
            return inputs
        body = eqn.params.get({**_INLINED, **_CUSTOM}.get(name, ""))
        if body is not None and (name in _INLINED or self.opened or _has_taps(body)):
            consts = getattr(body, "consts", ())
            return self.inline(getattr(body, "jaxpr", body), consts, inputs, layer)
        if name == "scan":
            return self.unroll(eqn, inputs, layer)
        return self.add(eqn, inputs)

    def unroll(self, eqn: Any, inputs: list[int], layer: str) -> list[int]:
        """Unrolls a scan: the slices of stacked parameters are parameters, too."""
        p = eqn.params
        length, closed = p["length"], p["jaxpr"]
        # How the parameters state these counts depends on the version of JAX. Only stacked values
        # have one axis more outside the body than inside.
        num_stacked = _count_deeper(eqn.invars, closed.jaxpr.invars)
        num_carry = len(eqn.outvars) - _count_deeper(eqn.outvars, closed.jaxpr.outvars)
        num_consts = len(inputs) - num_stacked - num_carry
        consts, rest = inputs[:num_consts], inputs[num_consts:]
        carry, stacked = rest[:num_carry], rest[num_carry:]
        steps: list[list[int]] = []
        order = range(length)[::-1] if p["reverse"] else range(length)
        for index in order:
            slices = [self.slice_of(number, index) for number in stacked]
            inner = [*consts, *carry, *slices]
            found = self.inline(closed.jaxpr, closed.consts, inner, str(index))
            carry, out = found[: len(carry)], found[len(carry) :]
            steps.append(out)
        ordered = steps[::-1] if p["reverse"] else steps
        columns = [*zip(*ordered, strict=True)]
        outputs = [self.apply(lambda *x: jax.numpy.stack(x), column) for column in columns]
        self.stacks |= dict(zip(outputs, columns, strict=True))
        return [*carry, *outputs]

    def slice_of(self, number: int, index: int) -> int:
        output = self.apply(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), [number])
        if number in self.parameters:
            self.parameters[output] = f"{self.parameters[number]}[{index}]"
        return output

    def apply(self, function: Callable[..., Any], inputs: Sequence[int]) -> int:
        """Adds the equations of a function of numbered values with one result."""
        closed = jax.make_jaxpr(function)(*(self.types[number] for number in inputs))
        (output,) = self.inline(closed.jaxpr, closed.consts, inputs, "")
        return output


def _count_deeper(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """The number of values of a scan that have one axis more outside its body than inside."""
    return sum(
        outer.aval.ndim > inner.aval.ndim for outer, inner in zip(outside, inside, strict=True)
    )


def _alone(eqn: Any) -> Callable[..., Sequence[Any]]:
    """Returns an equation as a function of all its inputs, literals among them."""
    new = core.gensym()
    inputs = [new(var.aval) for var in eqn.invars]
    outputs = [new(var.aval) for var in eqn.outvars]
    alone = eqn.replace(invars=inputs, outvars=outputs)
    names = [""] * len(inputs), [""] * len(outputs)
    info = core.DebugInfo("parity", eqn.primitive.name, *map(tuple, names))
    jaxpr = core.Jaxpr((), inputs, outputs, [alone], eqn.effects, info)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))
    types: list[Any] = [var.aval for var in inputs]
    if not any(map(_is_key, (*types, *(var.aval for var in outputs)))):
        return run

    def run_on_numbers(*values: Any) -> list[Any]:
        given = [
            _key(value, like.dtype) if _is_key(like) else value
            for value, like in zip(values, types, strict=True)
        ]
        return [jax.random.key_data(each) if _is_key(each) else each for each in run(*given)]

    return run_on_numbers


def _is_key(like: Any) -> bool:
    """Whether values are keys of `jax.random`, in whose place their numbers are kept."""
    return jnp.issubdtype(like.dtype, jax.dtypes.prng_key)


def _key(numbers: Any, dtype: Any) -> Any:
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(jnp.empty((), dtype)))


def _has_taps(body: Any) -> bool:
    jaxpr = getattr(body, "jaxpr", body)
    return any(
        eqn.primitive.name == "name" or any(map(_has_taps, core.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
