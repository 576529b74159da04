"""Causes in linear maps: those of attention, of feed-forward networks, and of the logits."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis import site_operations
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    SuspectSite,
    alternatives,
    cause,
)
from flaxformer_mt.parity.diagnosis.inputs import DiagnosisInputs, ParsedSite, with_values
from flaxformer_mt.parity.diagnosis.operations import (
    Given,
    LayerNormalization,
    LinearMap,
    Logits,
    Operation,
    Residual,
    Softmax,
)


@cause(LinearMap)
def _bias_missing_or_twice(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    if linear.bias is not None:
        yield Candidate("bias missing", "the reference adds no bias here", linear.but(bias=None))
        yield Candidate(
            "bias added twice",
            "the reference adds the bias twice here",
            linear.but(bias=2 * linear.bias),
        )


@cause(LinearMap)
def _transposed_matrix(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    if len(set(linear.kernel.shape)) == 1:
        yield Candidate(
            "transposed matrix",
            "the reference multiplies by the transposed matrix here",
            linear.but(kernel=linear.kernel.T),
        )


@cause(LinearMap)
def _operand(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    if not site.parsed.reads_the_stream:
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
    yield Candidate(
        "parallel sub-layers",
        f"the reference's {found.group} reads the input of the layer; ours reads the output "
        "of the previous sub-layer",
        linear.but(x=from_layer),
    )


@cause(LinearMap)
def _attended(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
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
    for name, words, x in others:
        yield Candidate(
            name,
            f"the reference's cross-attention attends to {words}; ours to the encoder's output",
            linear.but(x=x),
        )


@cause(LinearMap)
def _borrowed_weights(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    for name, lender in _lenders(site.parsed, site.inputs):
        found = site_operations.linear_map(site.inputs, lender, linear.x)
        if found.kernel.shape == linear.kernel.shape:
            yield Candidate(
                name,
                f"the reference uses here the {lender.part} weights of {lender.group} in "
                f"{lender.stack} layer {lender.layer}",
                found,
            )


@cause(LayerNormalization)
@cause(Residual)
def _borrowed_sublayer(
    operation: LayerNormalization | Residual, site: SuspectSite
) -> Iterator[Candidate]:
    found, inputs = site.parsed, site.inputs
    group = f"{found.prefix}/{found.group}"
    is_norm = isinstance(operation, LayerNormalization)
    if f"{group}/output" not in inputs.ours or f"{group}/output" in inputs.theirs:
        return  # It does not exist, or has been compared.
    if is_norm and inputs.config.norm_position == "pre":
        return
    parts = [name for name in inputs.ours if name.startswith(f"{group}/")]
    x = site_operations.sublayer_input(inputs, found)
    for name, lender in _lenders(found._replace(part="output"), inputs):
        changed = _with_weights_of(inputs, found, lender)
        if changed is None or lender.part != "output":
            continue
        for part in parts:
            value = site_operations.operation(changed, part).value()
            changed = with_values(changed, {part: value})
        theirs: Operation = Residual(x, changed.ours[f"{group}/output"])
        if is_norm:  # A part of the module.
            theirs = site_operations.normalization(inputs, lender, theirs.value())
        yield Candidate(
            name,
            f"the reference's {found.group} has all weights of {lender.group} in {lender.stack} "
            f"layer {lender.layer}",
            theirs,
        )


def _with_weights_of(
    inputs: DiagnosisInputs, own: ParsedSite, lender: ParsedSite
) -> DiagnosisInputs | None:
    params = inputs.params
    own_path, their_path = (f"{each.stack}/layers/{each.group}/" for each in (own, lender))
    held = {path: weights.copy() for path, weights in params.items() if path.startswith(own_path)}
    lent = {
        own_path + path.removeprefix(their_path): weights[lender.layer]
        for path, weights in params.items()
        if path.startswith(their_path)
    }
    shapes = {path: weights.shape[1:] for path, weights in held.items()}
    if shapes != {path: weights.shape for path, weights in lent.items()}:
        return None
    for path, weights in lent.items():
        held[path][own.layer] = weights
    return inputs._replace(params={**params, **held})


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
def _feed_forward_replaced(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
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
    yield from alternatives(Given(x), "feed-forward replaced", words, "result", others)


@cause(Logits)
def _logit_scale(logits: Logits, site: SuspectSite) -> Iterator[Candidate]:
    root = logits.x.shape[-1] ** 0.5
    listed = {"1": 1.0, "1 / sqrt(D)": 1 / root, "sqrt(D)": root, "1 / D": root**-2}
    solved = site.solved_scale(logits.but(scale=1.0).value())
    words = f"the reference multiplies logits by {{}}, ours by {logits.scale:g}"
    yield from alternatives(logits, "logit scale", words, "scale", listed | solved)


@cause(Logits)
def _wrong_output(logits: Logits, site: SuspectSite) -> Iterator[Candidate]:
    for name in ("source_embedding", "target_embedding"):
        table = site.inputs.params.get(f"{name}/embedding")
        if table is not None and len(table) == logits.kernel.shape[1]:
            yield Candidate(
                "wrong output table",
                f"the reference's output matrix is the {name.replace('_', ' ')}",
                logits.but(kernel=table.T),
            )
    yield Candidate(
        "final norm missing",
        "the reference computes logits from the decoder's last layer, without the final norm",
        logits.but(x=site_operations.stack_output(site.inputs, "decoder", normalized=False)),
    )


@cause(Logits)
def _softmax_in_the_output(logits: Logits, site: SuspectSite) -> Iterator[Candidate]:
    probabilities = Softmax(logits.value()).value()
    results = {"log-probabilities": np.log(probabilities), "probabilities": probabilities}
    words = "the reference returns {}, ours logits"
    yield from alternatives(Given(probabilities), "softmax in the output", words, "result", results)


@cause(LinearMap)
def _other_bias(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None:
        return
    scale = linear.scale if isinstance(linear, Logits) else 1.0
    change = np.mean(site.rows(site.theirs - linear.value()), axis=0) / scale
    largest = int(np.argmax(np.abs(change)))
    if linear.bias is None:
        cause, words, bias = "bias added", "a bias that ours lacks", change
    else:
        cause, words, bias = "different weights", "another bias", linear.bias + change
    yield Candidate(
        cause,
        f"the reference has {words} here; the largest difference is {change[largest]:.6g} at "
        f"[{largest}]",
        linear.but(bias=bias),
    )


@cause(LinearMap)
def _other_matrix(linear: LinearMap, site: SuspectSite) -> Iterator[Candidate]:
    if site.theirs is None:
        return
    x = site.rows(linear.x)
    # With fewer rows, any difference is explained by some matrix.
    if len(x) <= x.shape[1]:
        return
    change = np.linalg.lstsq(x, site.rows(site.theirs - linear.value()))[0]
    row, column = np.unravel_index(np.argmax(np.abs(change)), change.shape)
    yield Candidate(
        "different weights",
        f"the reference has another matrix here; the largest difference is "
        f"{change[row, column]:.6g} at [{row}, {column}]",
        linear.but(kernel=linear.kernel + change),
    )
