"""Names values inside a JAX function, so that they can be compared.

A tap is JAX's own `checkpoint_name`, which has no effect on the result or the speed: code that
must not depend on this package can call `jax.ad_checkpoint.checkpoint_name(value, name)` instead.
In the body of a `lax.scan`, "{layer}" in a name is the iteration.

Modules of Linen and Equinox need no taps of their own: `linen_taps` and `equinox_taps` name the
output of every sub-module by its path. A function may also return intermediates, as Linen's
`capture_intermediates` and NNX's `capture` provide them; see `compare_models`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

_SCOPE: ContextVar[tuple[str, ...]] = ContextVar("scope", default=())


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefixes the names of all taps within by `name` and a slash; scopes nest."""
    token = _SCOPE.set((*_SCOPE.get(), name))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def tap(name: str, value: Any) -> Any:
    """Names a value, an array or a tree of arrays, and returns it.

    The name, such as "layers/0/attention/scores", is without scopes. Leaves of a tree have their
    paths appended. A name that occurs again gets the suffix "#1", "#2" ...
    """
    full = "/".join((*_SCOPE.get(), name))

    def named(path: Any, leaf: Any) -> Any:
        return checkpoint_name(leaf, "/".join(filter(None, (full, leaf_name(path)))))

    return jax.tree_util.tree_map_with_path(named, value)


def leaf_name(path: Any) -> str:
    """Returns the path of a leaf in a tree with slashes, such as "encoder/layers/0/kernel"."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value")  # The variables of NNX.


@contextlib.contextmanager
def linen_taps() -> Iterator[None]:
    """Taps the output of every Linen module that is called within, by its path."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = call(*args, **kwargs)
        path = "/".join(context.module.path)
        if context.method_name != "__call__" or not path:
            return output
        return tap(path, output)

    with nn.intercept_methods(intercept):
        yield


def equinox_taps(model: Any, path: str = "") -> Any:
    """Returns an Equinox module in which the output of every sub-module is tapped by its path.

    Make it inside the function that is compared, so that parameters keep their paths.
    """

    def is_part(value: Any) -> bool:
        return value is not model and dataclasses.is_dataclass(value)

    def tapped(inner: Any, part: Any) -> Any:
        name = "/".join(filter(None, (path, leaf_name(inner))))
        return equinox_taps(part, name) if is_part(part) else part

    clone = jax.tree_util.tree_map_with_path(tapped, model, is_leaf=is_part)
    return _Tapped(clone, path) if callable(model) and path else clone


class _Tapped:
    def __init__(self, module: Any, path: str) -> None:
        self._module, self._path = module, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tap(self._path, self._module(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
