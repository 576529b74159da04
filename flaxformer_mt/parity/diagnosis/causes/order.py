"""Causes that concern a whole layer or stack: its parts run in another order.

What each part reads is found first. A cause is only named if all parts are then in one order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import Candidate, SuspectSite, cause
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, select_rows
from flaxformer_mt.parity.diagnosis.operations import (
    Given,
    LayerNormalization,
    LinearMap,
    Logits,
    Residual,
)

Streamed = LayerNormalization | LinearMap | Residual


@cause(LayerNormalization)
@cause(LinearMap)
@cause(Residual)
@cause(Given)
def _sublayer_order(operation: Streamed | Given, site: SuspectSite) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    if found.layer is None:
        return
    groups = _groups(inputs, found.stack)
    end = "norm" if inputs.config.norm_position == "post" else "sum"
    ends = {group: f"{found.prefix}/{group}_{end}" for group in groups}
    start = site_operations.layer_input(inputs, found.stack, found.layer)
    order = _order(inputs, groups, start, ends, lambda group: _first(inputs, found.prefix, group))
    if order is None or order == groups:
        return
    theirs, ours = ", then ".join(order), ", then ".join(groups)
    words = f"the reference runs {theirs} in {found.prefix}, ours {ours}"
    if found.part == "layer":
        yield Candidate("sub-layer order", words, Given(inputs.theirs[ends[order[-1]]]))
    elif _reads_the_stream(operation, site):
        before = order.index(found.group) - 1
        value = inputs.theirs[ends[order[before]]] if before >= 0 else start
        yield Candidate("sub-layer order", words, operation.but(x=value))


@cause(LayerNormalization)
@cause(LinearMap)
@cause(Residual)
def _layer_order(operation: Streamed, site: SuspectSite) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    c = inputs.config
    stack = "encoder" if found.reads_the_encoder else found.stack
    names = [
        str(i) for i in range(c.num_encoder_layers if stack == "encoder" else c.num_decoder_layers)
    ]
    ends = {name: f"{stack}/layers/{name}" for name in names}
    group = _groups(inputs, stack)[0]
    start = site_operations.stack_input(inputs, stack)
    order = _order(inputs, names, start, ends, lambda name: _first(inputs, ends[name], group))
    if order is None or order == names:
        return
    on_top = found.reads_the_encoder or isinstance(operation, Logits)
    if found.group == "final" or (on_top and f"{stack}/final_norm" not in inputs.ours):
        before = len(order) - 1
    elif found.layer is not None and found.group == group and _reads_the_stream(operation, site):
        before = order.index(str(found.layer)) - 1
    else:
        return
    yield Candidate(
        "reversed layers" if order == names[::-1] else "layer order",
        f"the reference runs the layers of the {stack} in the order {', '.join(order)}",
        operation.but(x=inputs.theirs[ends[order[before]]] if before >= 0 else start),
    )


def _groups(inputs: DiagnosisInputs, stack: str) -> list[str]:
    attends = stack == "decoder" and inputs.config.has_inputs
    return ["self_attention", *(["cross_attention"] if attends else []), "feed_forward"]


def _first(inputs: DiagnosisInputs, prefix: str, group: str) -> str:
    if inputs.config.norm_position == "pre":
        return f"{prefix}/{group}_norm"
    return f"{prefix}/{group}/{'hidden' if group == 'feed_forward' else 'query'}"


def _reads_the_stream(operation: Streamed | Given, site: SuspectSite) -> bool:
    if isinstance(operation, LinearMap):
        return site.inputs.config.norm_position == "post" and site.parsed.reads_the_stream
    if isinstance(operation, LayerNormalization):
        return site.inputs.config.norm_position == "pre" or site.parsed.group == "final"
    return isinstance(operation, Residual)


def _order(
    inputs: DiagnosisInputs,
    parts: Sequence[str],
    start: np.ndarray,
    ends: Mapping[str, str],
    first: Callable[[str], str],
) -> list[str] | None:
    """Returns the order in which the reference runs the parts of a chain that begins with `start`.

    `ends` are the sites of the parts' results, and `first` gives the site in a part that reads its
    input. None unless every part reads what exactly one other part, or the start, gives.
    """
    values = {name: inputs.theirs.get(ends[name]) for name in parts}
    order: list[str] = []
    value: np.ndarray | None = start
    while value is not None and len(order) < len(parts):
        readers = [name for name in parts if reads(inputs, first(name), value)]
        if len(readers) != 1 or readers[0] in order:
            return None
        order.append(readers[0])
        value = values[readers[0]]
    return order if len(order) == len(parts) and value is not None else None


def reads(inputs: DiagnosisInputs, site: str, value: np.ndarray) -> bool:
    """Returns whether the reference's value of a site is computed from this input."""
    expected = inputs.theirs.get(site)
    if expected is None:
        return False
    operation = site_operations.operation(inputs, site)
    if not isinstance(operation, LayerNormalization | LinearMap):
        return False
    if value.shape != operation.x.shape:
        return False
    predicted = operation.but(x=value).value()
    ours, theirs = (select_rows(site, array, inputs.real) for array in (predicted, expected))
    return bool(np.max(np.abs(ours - theirs)) <= inputs.tolerance * np.max(np.abs(theirs)))


def per_layer_memory(inputs: DiagnosisInputs) -> bool:
    """Returns whether each layer of the decoder attends to that layer of the encoder."""
    layers = range(inputs.config.num_decoder_layers)
    if not 1 < len(layers) <= inputs.config.num_encoder_layers:
        return False
    for layer in layers:
        memory = inputs.theirs.get(f"encoder/layers/{layer}")
        key = f"decoder/layers/{layer}/cross_attention/key"
        if memory is None or not reads(inputs, key, memory):
            return False
    return True
