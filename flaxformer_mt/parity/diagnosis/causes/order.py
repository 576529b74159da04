"""Causes that concern a whole layer or stack: its parts run in another order.

What each part reads is found first. A cause is only named if all parts are then in one order.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import Candidate, Found, SuspectSite, cause
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, relative_difference, select_rows

Streamed: TypeAlias = ops.LayerNormalization | ops.LinearMap | ops.Residual


@cause(ops.LayerNormalization, ops.LinearMap, ops.Residual, ops.Given)
def _sublayer_order(operation: Streamed | ops.Given, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    if found.layer is None:
        return
    groups = inputs.sublayers(found.stack)
    parts = {
        group: (_first(inputs, found.prefix, group), inputs.sublayer_end(found.prefix, group))
        for group in groups
    }
    start = site_operations.layer_input(inputs, found.stack, found.layer)
    operands, result = _in_another_order(inputs, parts, start)
    theirs, ours = ", then ".join(operands), ", then ".join(groups)
    words = f"the reference runs {theirs} in {found.prefix}, ours {ours}"
    if found.part == "layer":
        yield Candidate("sub-layer order", words, ops.Given(result))
    elif _reads_the_stream(operation, site):
        yield Candidate("sub-layer order", words, operation.but(x=operands[found.group]))


@cause(ops.LayerNormalization, ops.LinearMap, ops.Residual)
def _layer_order(operation: Streamed, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    stack = "encoder" if found.reads_the_encoder else found.stack
    group = inputs.sublayers(stack)[0]
    names = [str(layer) for layer in range(inputs.num_layers(stack))]
    ends = {name: f"{stack}/layers/{name}" for name in names}
    parts = {name: (_first(inputs, end, group), end) for name, end in ends.items()}
    start = site_operations.stack_input(inputs, stack)
    operands, result = _in_another_order(inputs, parts, start)
    on_top = found.reads_the_encoder or isinstance(operation, ops.Logits)
    if found.group == "final" or (on_top and f"{stack}/final_norm" not in inputs.ours):
        x = result
    elif found.layer is not None and found.group == group and _reads_the_stream(operation, site):
        x = operands[str(found.layer)]
    else:
        return
    order = list(operands)
    label = "reversed layers" if order == names[::-1] else "layer order"
    words = f"the reference runs the layers of the {stack} in the order {', '.join(order)}"
    yield Candidate(label, words, operation.but(x=x))


def _first(inputs: DiagnosisInputs, prefix: str, group: str) -> str:
    if inputs.config.norm_position == "pre":
        return f"{prefix}/{group}_norm"
    return f"{prefix}/{group}/{'hidden' if group == 'feed_forward' else 'query'}"


def _reads_the_stream(operation: Streamed | ops.Given, site: SuspectSite) -> bool:
    if isinstance(operation, ops.LinearMap):
        return site.inputs.config.norm_position == "post" and site.parsed.reads_the_stream
    if isinstance(operation, ops.LayerNormalization):
        return site.inputs.config.norm_position == "pre" or site.parsed.group == "final"
    return isinstance(operation, ops.Residual)


def _in_another_order(
    inputs: DiagnosisInputs, parts: Mapping[str, tuple[str, str]], start: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns what each part of a chain reads, in the reference's order, and the last result.

    `parts` has the site in a part that reads its input, and that of its result; the chain begins
    with `start`. Raises `NotComputed` if the order is ours, or unless every part reads what exactly
    one other part, or the start, gives.
    """
    operands: dict[str, np.ndarray] = {}
    value: np.ndarray | None = start
    while value is not None and len(operands) < len(parts):
        readers = [name for name, (first, _) in parts.items() if reads(inputs, first, value)]
        if len(readers) != 1 or readers[0] in operands:
            raise site_operations.NotComputed
        operands[readers[0]] = value
        value = inputs.theirs.get(parts[readers[0]][1])
    if value is None or list(operands) == list(parts):
        raise site_operations.NotComputed
    return operands, value


def reads(inputs: DiagnosisInputs, site: str, value: np.ndarray) -> bool:
    """Returns whether the reference's value of a site is computed from this input."""
    expected = inputs.theirs.get(site)
    if expected is None:
        return False
    operation = site_operations.operation(inputs, site)
    if not isinstance(operation, ops.LayerNormalization | ops.LinearMap):
        return False
    if value.shape != operation.x.shape:
        return False
    predicted = operation.but(x=value).value()
    ours, theirs = (select_rows(site, array, inputs.real) for array in (predicted, expected))
    return relative_difference(ours, theirs) <= inputs.tolerance


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
