"""Causes in the loss."""

import math
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis import operations as ops
from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    Found,
    SuspectSite,
    alternatives,
    cause,
    combinations,
    shown,
)


@cause(ops.Loss)
def _conventions(loss: ops.Loss, site: SuspectSite) -> Found:
    names = {
        "convention": "label-smoothing convention",
        "smoothing": "smoothing amount",
        "pad_id": "padding in the loss",
        "reduction": "loss reduction",
    }
    choices: dict[str, list[Any]] = {
        "convention": [*ops.CONVENTIONS],
        "smoothing": [0.0, 0.1, 0.05, 0.15, 0.2, 0.3],
        "pad_id": [ops.NO_PADDING],
        "reduction": [*ops.REDUCTIONS],
    }
    ours = {name: getattr(loss, name) for name in choices}
    for change in combinations(ours, choices, most=2):
        changed = loss.but(**change)
        # Two conventions label padding as a class of its own.
        labels_padding = changed.convention in ("non_pad_kl", "annotated_wide_heads")
        if changed.pad_id == ops.NO_PADDING and labels_padding:
            continue
        words = [
            "padding counted in"
            if name == "pad_id"
            else f"{names[name]} {shown(value)} in place of {shown(ours[name])}"
            for name, value in change.items()
        ]
        label = " and ".join(names[name] for name in change)
        yield Candidate(label, f"the reference's loss has {', '.join(words)}", changed)


@cause(ops.Loss)
def _logarithm_base(loss: ops.Loss, site: SuspectSite) -> Found:
    words = "the reference's loss has logarithms to the base {}, ours natural ones"
    values = {str(base): loss.value() / math.log(base) for base in (2, 10)}
    yield from alternatives(ops.Given(loss.value()), "logarithm base", words, "result", values)


@cause(ops.Loss)
def _shifted_targets(loss: ops.Loss, site: SuspectSite) -> Found:
    inputs = site.inputs.tokens.target_input
    words = "the reference's loss compares logits with the decoder's inputs instead of its targets"
    if inputs.min() >= 0:
        yield Candidate("shifted targets", words, loss.but(targets=inputs.astype(np.int64)))
