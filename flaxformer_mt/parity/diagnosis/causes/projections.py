"""Causes in linear maps (attention, feed-forward networks, logits), and in what layers read."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.order import Streamed, per_layer_memory
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
)
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, ParsedSite, parse_site
from flaxformer_mt.parity.diagnosis.operations import LinearMap, Logits


@cause(LinearMap)
def _bias_or_transpose(linear: LinearMap, site: SuspectSite) -> Found:
    if linear.bias is not None:
        yield Candidate("bias missing", "the reference adds no bias here", linear.but(bias=None))
        words = "the reference adds the bias twice here"
        yield Candidate("bias added twice", words, linear.but(bias=2 * linear.bias))
    if len(set(linear.kernel.shape)) == 1:
        words = "the reference multiplies by the transposed matrix here"
        yield Candidate("transposed matrix", words, linear.but(kernel=linear.kernel.T))


@cause(LinearMap)
def _operand(linear: LinearMap, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    if not found.reads_the_stream:
        return
    x = site_operations.sublayer_input(inputs, found)
    from_layer = site_operations.layer_input(inputs, found.stack, found.layer or 0)
    if inputs.config.norm_position == "pre":
        from_layer = site_operations.normalization(inputs, found, from_layer).value()
        words = f"the reference's {found.group} reads its input without a norm; ours is pre-norm"
    else:
        x = site_operations.normalization(inputs, found, x).value()
        words = f"the reference is pre-norm, its {found.group} reads norm(x); ours is post-norm"
    yield Candidate("norm position", words, linear.but(x=x))
    words = (
        f"the reference's {found.group} reads the input of the layer; ours reads the output "
        "of the previous sub-layer"
    )
    yield Candidate("parallel sub-layers", words, linear.but(x=from_layer))


@cause(LinearMap)
def _attended(linear: LinearMap, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    if not found.reads_the_encoder:
        return
    not_normalized = site_operations.stack_output(inputs, "encoder", normalized=False)
    decoder = site_operations.sublayer_operand(inputs, found)
    embeddings = site_operations.stack_input(inputs, "encoder")
    others = [
        ("final norm missing", "the encoder's output before its final norm", not_normalized),
        ("attends to the decoder", "the decoder itself", decoder),
        ("attends to the embeddings", "the input of the encoder", embeddings),
    ]
    for label, attended, x in others:
        words = (
            f"the reference's cross-attention attends to {attended}; ours to the encoder's output"
        )
        yield Candidate(label, words, linear.but(x=x))


@cause(LinearMap)
def _borrowed_weights(linear: LinearMap, site: SuspectSite) -> Found:
    for label, lender in _lenders(site.parsed, site.inputs):
        found = site_operations.linear_map(site.inputs, lender, linear.x)
        if found.kernel.shape == linear.kernel.shape:
            words = (
                f"the reference uses here the {lender.part} weights of {lender.group} in "
                f"{lender.stack} layer {lender.layer}"
            )
            yield Candidate(label, words, found)


@cause(ops.LayerNormalization, ops.Residual)
def _borrowed_sublayer(
    operation: ops.LayerNormalization | ops.Residual, site: SuspectSite
) -> Found:
    found, inputs = site.parsed, site.inputs
    output = f"{found.prefix}/{found.group}/output"
    is_norm = isinstance(operation, ops.LayerNormalization)
    if output not in inputs.ours or output in inputs.theirs:
        return  # It does not exist, or has been compared.
    if is_norm and inputs.config.norm_position == "pre":
        return
    x = site_operations.sublayer_input(inputs, found)
    for label, lender in _lenders(found._replace(part="output"), inputs):
        changed = _with_weights_of(inputs, found, lender)
        if changed is None or lender.part != "output":
            continue
        changed = site_operations.recomputed(changed, inputs.inside(found))
        theirs: ops.Operation = ops.Residual(x, changed.ours[output])
        if is_norm:  # A part of the module.
            theirs = site_operations.normalization(inputs, lender, theirs.value())
        words = (
            f"the reference's {found.group} has all weights of {lender.group} in {lender.stack} "
            f"layer {lender.layer}"
        )
        yield Candidate(label, words, theirs)


def _with_weights_of(
    inputs: DiagnosisInputs, own: ParsedSite, lender: ParsedSite
) -> DiagnosisInputs | None:
    own_path, their_path = (f"{each.stack}/layers/{each.group}/" for each in (own, lender))
    params = inputs.params
    held, lent = (
        {path.removeprefix(start): params[path] for path in params if path.startswith(start)}
        for start in (own_path, their_path)
    )
    shapes, their_shapes = (
        {name: weights.shape[1:] for name, weights in each.items()} for each in (held, lent)
    )
    if shapes != their_shapes:
        return None
    changed = {own_path + name: weights.copy() for name, weights in held.items()}
    for name, weights in lent.items():
        changed[own_path + name][own.layer] = weights[lender.layer]
    return inputs._replace(params={**params, **changed})


def _lenders(own: ParsedSite, inputs: DiagnosisInputs) -> Iterator[tuple[str, ParsedSite]]:
    if own.layer is None:
        return
    kernels = inputs.params
    choices: list[tuple[str, str, Iterable[Any]]] = [
        ("wrong projection", "part", ("query", "key", "value")),
        ("wrong attention", "group", ("self_attention", "cross_attention")),
        ("wrong layer", "layer", range(len(kernels[f"{own.path}/kernel"]))),
    ]
    for name, component, values in choices:
        for value in values:
            lender = own._replace(**{component: value})
            if lender != own and f"{lender.path}/kernel" in kernels:
                yield name, lender


@cause(LinearMap)
def _feed_forward_replaced(linear: LinearMap, site: SuspectSite) -> Found:
    found, inputs = site.parsed, site.inputs
    if (found.group, found.part) != ("feed_forward", "output"):
        return
    x = site_operations.sublayer_operand(inputs, found)
    others = {"nothing": x, "zeros": np.zeros_like(x)}
    embedded = "source/embedded" if found.stack == "encoder" else "target/embedded"
    if embedded in inputs.ours:
        positions = site_operations.operation(inputs, embedded).but(embedding=x)
        others["a positional encoding"] = positions.value()
    words = "the reference has {} in place of the feed-forward network"
    yield from alternatives(ops.Given(x), "feed-forward replaced", words, "result", others)


@cause(Logits)
def _logit_scale(logits: Logits, site: SuspectSite) -> Found:
    root = logits.x.shape[-1] ** 0.5
    listed = {"1": 1.0, "1 / sqrt(D)": 1 / root, "sqrt(D)": root, "1 / D": root**-2}
    solved = site.solved_scale(logits.but(scale=1.0).value())
    words = f"the reference multiplies logits by {{}}, ours by {logits.scale:g}"
    yield from alternatives(logits, "logit scale", words, "scale", listed | solved)


@cause(Logits)
def _wrong_output(logits: Logits, site: SuspectSite) -> Found:
    for name in ("source_embedding", "target_embedding"):
        table = site.inputs.params.get(f"{name}/embedding")
        if table is not None and len(table) == logits.kernel.shape[1]:
            words = f"the reference's output matrix is the {name.replace('_', ' ')}"
            yield Candidate("wrong output table", words, logits.but(kernel=table.T))
    x = site_operations.stack_output(site.inputs, "decoder", normalized=False)
    words = "the reference computes logits from the decoder's last layer, without the final norm"
    yield Candidate("final norm missing", words, logits.but(x=x))
    probabilities = ops.Softmax(logits.value()).value()
    results = {"log-probabilities": np.log(probabilities), "probabilities": probabilities}
    words = "the reference returns {}, ours logits"
    given = ops.Given(probabilities)
    yield from alternatives(given, "softmax in the output", words, "result", results)


@cause(LinearMap)
def _other_bias(linear: LinearMap, site: SuspectSite) -> Found:
    scale = linear.scale if isinstance(linear, Logits) else 1.0
    change = np.mean(site.rows(site.theirs - linear.value()), axis=0) / scale
    largest = int(np.argmax(np.abs(change)))
    if linear.bias is None:
        cause, what, bias = "bias added", "a bias that ours lacks", change
    else:
        cause, what, bias = "different weights", "another bias", linear.bias + change
    words = (
        f"the reference has {what} here; the largest difference is {change[largest]:.6g} at "
        f"[{largest}]"
    )
    yield Candidate(cause, words, linear.but(bias=bias))


@cause(LinearMap)
def _other_matrix(linear: LinearMap, site: SuspectSite) -> Found:
    x = site.rows(linear.x)
    # With fewer rows, any difference is explained by some matrix.
    if len(x) <= x.shape[1]:
        return
    change = np.linalg.lstsq(x, site.rows(site.theirs - linear.value()))[0]
    row, column = np.unravel_index(np.argmax(np.abs(change)), change.shape)
    words = (
        f"the reference has another matrix here; the largest difference is "
        f"{change[row, column]:.6g} at [{row}, {column}]"
    )
    yield Candidate("different weights", words, linear.but(kernel=linear.kernel + change))


@cause(ops.Given)
def _skipped_layer(layer: ops.Given, site: SuspectSite) -> Found:
    found = site.parsed
    if found.part == "layer" and found.layer is not None:
        x = site_operations.layer_input(site.inputs, found.stack, found.layer)
        yield Candidate("skipped layer", f"the reference omits {found.prefix}", ops.Given(x))


@cause(ops.Residual)
def _wrong_residual(residual: ops.Residual, site: SuspectSite) -> Found:
    found = site.parsed
    x = site_operations.layer_input(site.inputs, found.stack, found.layer or 0)
    words = f"the reference adds the output of {found.group} to the input of the layer"
    yield Candidate("wrong residual", words, residual.but(x=x))


@cause(ops.LayerNormalization, ops.LinearMap, ops.Residual)
def _other_layer(operation: Streamed, site: SuspectSite) -> Found:
    reads_a_layer = site.parsed.reads_the_stream or site.parsed.reads_the_encoder
    is_inside = isinstance(operation, ops.LinearMap) and not isinstance(operation, ops.Logits)
    if is_inside and not reads_a_layer:
        return
    own = site.parsed.layer
    for name, value in {**site.inputs.again, **site.inputs.theirs}.items():
        found = parse_site(name.split("#")[0])
        if found.part != "layer" or found.layer is None or value.shape != operation.x.shape:
            continue
        words = f"the output of {found.prefix}"
        if "#" in name:
            cause, words = "repeated layer", f"the second output of {found.prefix}"
        elif site.parsed.reads_the_encoder:
            each = found.layer == own and per_layer_memory(site.inputs)
            cause = "per-layer memory" if each else "memory of another layer"
        else:
            stop = len(site.inputs.ours) if own is None else own
            between = (f"{found.stack}/layers/{i}" for i in range(found.layer + 1, stop))
            passed = found.layer < stop - 1 and not any(x in site.inputs.theirs for x in between)
            cause = "skipped layer" if passed else "layer order"
        yield Candidate(cause, f"the reference reads {words} here", operation.but(x=value))
