"""Causes in the linear maps: of attention, of feed-forward networks, and to the logits."""

from collections.abc import Iterator

import numpy as np

from flaxformer_mt.parity.diagnosis import equations
from flaxformer_mt.parity.diagnosis.causes.registry import Clue, Hypothesis, cause
from flaxformer_mt.parity.diagnosis.equations import Given, Logits, Projection, Softmax
from flaxformer_mt.parity.diagnosis.evidence import Place


@cause(Projection)
def bias_missing_or_twice(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """Left out, or added twice."""
    if projection.bias is not None:
        yield Hypothesis(
            "bias missing", "the reference adds no bias here", projection.but(bias=None)
        )
        yield Hypothesis(
            "bias added twice",
            "the reference adds the bias twice here",
            projection.but(bias=2 * projection.bias),
        )


@cause(Projection)
def transposed_matrix(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """A square matrix the other way round."""
    if len(set(projection.kernel.shape)) == 1:
        yield Hypothesis(
            "transposed matrix",
            "the reference multiplies with the transposed matrix here",
            projection.but(kernel=projection.kernel.T),
        )


@cause(Projection)
def operand(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """A sub-layer reads what is not normalised, or already is; or what went into the layer."""
    found, evidence = clue.place, clue.evidence
    if not clue.place.reads_the_stream:
        return
    x = equations.sublayer_input(evidence, found)
    from_layer = equations.layer_input(evidence, found.stack, found.layer or 0)
    if evidence.config.norm_position == "pre":
        from_layer = equations.norm(evidence, found, from_layer).value()
        words = f"the reference's {found.group} reads what is not normalised; ours is pre-norm"
    else:
        x = equations.norm(evidence, found, x).value()
        words = f"the reference is pre-norm, its {found.group} reads norm(x); ours is post-norm"
    yield Hypothesis("norm position", words, projection.but(x=x))
    yield Hypothesis(
        "parallel sub-layers",
        f"the reference's {found.group} reads what goes into the layer; ours reads what the "
        "sub-layer before gives",
        projection.but(x=from_layer),
    )


@cause(Projection)
def attended(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """Keys and values of cross-attention come from something else than the encoder's output."""
    found, evidence = clue.place, clue.evidence
    if not found.reads_the_encoder:
        return
    not_normalised = equations.stack_output(evidence, "encoder", normalised=False)
    others = [
        ("final norm missing", "the encoder's output before its final norm", not_normalised),
        (
            "attends to the decoder",
            "the decoder itself",
            equations.sublayer_operand(evidence, found),
        ),
        (
            "attends to the embeddings",
            "what goes into the encoder",
            equations.stack_input(evidence, "encoder"),
        ),
    ]
    for name, words, x in others:
        yield Hypothesis(
            name,
            f"the reference's cross-attention attends to {words}; ours to the encoder's output",
            projection.but(x=x),
        )


@cause(Projection)
def borrowed_weights(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """Query, key and value change places; another attention or layer lends its weights."""
    for name, lender in _lenders(clue):
        found = equations.projection(clue.evidence, lender, projection.x)
        if found.kernel.shape == projection.kernel.shape:
            yield Hypothesis(
                name,
                f"the reference uses here the {lender.part} weights of {lender.group} in "
                f"{lender.stack} layer {lender.layer}",
                found,
            )


def _lenders(clue: Clue) -> Iterator[tuple[str, Place]]:
    """Where weights may have been taken from by mistake: places one step from the right one."""
    own = clue.place
    if own.layer is None:
        return
    kernels = clue.evidence.params
    lenders = [
        *(("wrong projection", own._replace(part=part)) for part in ("query", "key", "value")),
        *(
            ("wrong attention", own._replace(group=group))
            for group in ("self_attention", "cross_attention")
        ),
        *(
            ("wrong layer", own._replace(layer=layer))
            for layer in range(len(kernels[f"{own.path}/kernel"]))
        ),
    ]
    for name, lender in lenders:
        if lender != own and f"{lender.path}/kernel" in kernels:
            yield name, lender


@cause(Projection)
def feed_forward_replaced(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """Something else stands where a feed-forward network belongs."""
    found, evidence = clue.place, clue.evidence
    if (found.group, found.part) != ("feed_forward", "output"):
        return
    x = equations.sublayer_operand(evidence, found)
    others = {"nothing": Given(x), "zeros": Given(np.zeros_like(x))}
    embedded = "source/embedded" if found.stack == "encoder" else "target/embedded"
    if embedded in evidence.ours:
        positions = equations.operation(evidence, embedded).but(embedding=x)
        others["a positional encoding"] = Given(positions.value())
    for name, operation in others.items():
        yield Hypothesis(
            "feed-forward replaced",
            f"the reference has {name} where the feed-forward network belongs",
            operation,
        )


@cause(Logits)
def logit_scale(logits: Logits, clue: Clue) -> Iterator[Hypothesis]:
    """Multiplied by 1, 1 / sqrt(D), sqrt(D), or whatever the reference's logits tell."""
    root = logits.x.shape[-1] ** 0.5
    listed = {"1": 1.0, "1 / sqrt(D)": 1 / root, "sqrt(D)": root, "1 / D": root**-2}
    solved = clue.solved_scale(logits.but(scale=1.0).value())
    for name, scale in (listed | solved).items():
        yield Hypothesis(
            "logit scale",
            f"the reference multiplies logits by {name}, ours by {logits.scale:g}",
            logits.but(scale=scale),
        )


@cause(Logits)
def wrong_output(logits: Logits, clue: Clue) -> Iterator[Hypothesis]:
    """Another table serves as the output's matrix, or the decoder's last norm is left out."""
    for name in ("source_embedding", "target_embedding"):
        table = clue.evidence.params.get(f"{name}/embedding")
        if table is not None and len(table) == logits.kernel.shape[1]:
            yield Hypothesis(
                "wrong output table",
                f"the reference's output matrix is the {name.replace('_', ' ')}",
                logits.but(kernel=table.T),
            )
    yield Hypothesis(
        "final norm missing",
        "the reference computes logits of what the decoder's last layer gives, without final norm",
        logits.but(x=equations.stack_output(clue.evidence, "decoder", normalised=False)),
    )


@cause(Logits)
def softmax_in_the_output(logits: Logits, clue: Clue) -> Iterator[Hypothesis]:
    """A softmax has been taken already."""
    probabilities = Softmax(logits.value()).value()
    for name, result in {
        "log-probabilities": np.log(probabilities),
        "probabilities": probabilities,
    }.items():
        yield Hypothesis(
            "softmax in the output", f"the reference gives {name}, ours logits", Given(result)
        )


@cause(Projection)
def other_bias(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """All rows differ by the same: a bias that our model lacks, or another one."""
    if clue.theirs is None:
        return
    scale = projection.scale if isinstance(projection, Logits) else 1.0
    change = np.mean(clue.rows(clue.theirs - projection.value()), axis=0) / scale
    largest = int(np.argmax(np.abs(change)))
    if projection.bias is None:
        cause, words, bias = "bias added", "a bias that ours lacks", change
    else:
        cause, words, bias = "different weights", "another bias", projection.bias + change
    yield Hypothesis(
        cause,
        f"the reference has {words} here; the largest difference is {change[largest]:.6g} at "
        f"[{largest}]",
        projection.but(bias=bias),
    )


@cause(Projection)
def other_matrix(projection: Projection, clue: Clue) -> Iterator[Hypothesis]:
    """A linear map with another matrix, which is solved for."""
    if clue.theirs is None:
        return
    x = clue.rows(projection.x)
    # With fewer rows some matrix explains anything.
    if len(x) <= x.shape[1]:
        return
    change = np.linalg.lstsq(x, clue.rows(clue.theirs - projection.value()))[0]
    row, column = np.unravel_index(np.argmax(np.abs(change)), change.shape)
    yield Hypothesis(
        "different weights",
        f"the reference has another matrix here; the largest difference is "
        f"{change[row, column]:.6g} at [{row}, {column}]",
        projection.but(kernel=projection.kernel + change),
    )
