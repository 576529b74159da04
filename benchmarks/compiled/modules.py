"""To which module of the model a kernel belongs."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from flaxformer_mt.accelerators import Accelerator

from .roofline import Kernel

_COPIES = re.compile(
    r"/while(/body)?(/closed_call)?$|/while/body/jit\(dynamic_(update_)?index_in_dim\)"
    r"|/while/body/(dynamic_slice|dynamic_update_slice|broadcast_in_dim|squeeze|sub|add)$"
)
_COMPONENTS = {
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
    "recurrence": "recurrence",
    "dropout": "dropout",
    "embedding_dropout": "dropout",
    "target_embedding": "embeddings",
    "source_embedding": "embeddings",
}
"""The names of modules in the source of a kernel."""
_OTHERS = (
    ("rest of the model", re.compile(r"jvp\(")),
    ("search", re.compile(r"jit\(step\)|jit\(run_search\)")),
    ("optimizer", re.compile(r"jit\(")),
)


class Group(NamedTuple):
    """Kernels of one module and direction."""

    name: str
    seconds: float
    """The least time of all of them."""
    flops: float
    bytes: float
    kernels: int


def module_of(source: str) -> str:
    """Returns the module and the direction for the source of a kernel, as the compiler gives it."""
    name = _name(source)
    if "rematted_computation" in source:
        return f"{name}, computed again"
    return f"{name}, backward" if "transpose(" in source else name


def _name(source: str) -> str:
    # The loss is not in a module, except for its own scope.
    if re.search(r"/loss/|jvp\((vmap\(\))?\)", source):
        return "loss"
    if _COPIES.search(source):
        return "copies of the loop"
    for component in source.split("/"):
        module, _, _ = component.partition(".")
        if module.endswith("_norm"):
            return "norms"
        if module in _COMPONENTS:
            stack = " of the encoder" if "encoder/" in source else ""
            return _COMPONENTS[module] + (stack if module == "self_attention" else "")
    return next((name for name, pattern in _OTHERS if pattern.search(source)), "no source")


def groups(kernels: Iterable[Kernel], device: Accelerator) -> list[Group]:
    """Adds up kernels by module, the most expensive first."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        found[module_of(kernel.source)].append(kernel)
    totals = [
        Group(
            name,
            sum(kernel.seconds(device) for kernel in members),
            sum(kernel.flops for kernel in members),
            sum(kernel.bytes for kernel in members),
            sum(kernel.times for kernel in members),
        )
        for name, members in found.items()
    ]
    return sorted(totals, key=lambda group: -group.seconds)
