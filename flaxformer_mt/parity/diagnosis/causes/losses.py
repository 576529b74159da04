"""Causes in the loss."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from flaxformer_mt.parity.diagnosis.causes.registry import (
    Candidate,
    SuspectSite,
    cause,
    combinations,
    shown,
)
from flaxformer_mt.parity.diagnosis.operations import (
    CONVENTIONS,
    NO_PADDING,
    REDUCTIONS,
    Given,
    Loss,
)


@cause(Loss)
def _conventions(loss: Loss, site: SuspectSite) -> Iterator[Candidate]:
    names = {
        "convention": "label-smoothing convention",
        "smoothing": "smoothing amount",
        "pad_id": "padding in the loss",
        "reduction": "loss reduction",
    }
    choices: dict[str, list[Any]] = {
        "convention": [*CONVENTIONS],
        "smoothing": [0.0, 0.1, 0.05, 0.15, 0.2, 0.3],
        "pad_id": [NO_PADDING],
        "reduction": [*REDUCTIONS],
    }
    ours = {name: getattr(loss, name) for name in choices}
    for change in combinations(ours, choices, most=2):
        changed = loss.but(**change)
        # Two conventions label padding as a class of its own.
        labels_padding = changed.convention in ("non_pad_kl", "annotated_wide_heads")
        if changed.pad_id == NO_PADDING and labels_padding:
            continue
        yield Candidate(
            " and ".join(names[name] for name in change),
            "the reference's loss has "
            + ", ".join(
                "padding counted in"
                if name == "pad_id"
                else f"{names[name]} {shown(value)} in place of {shown(ours[name])}"
                for name, value in change.items()
            ),
            changed,
        )


@cause(Loss)
def _logarithm_base(loss: Loss, site: SuspectSite) -> Iterator[Candidate]:
    for base in (2, 10):
        yield Candidate(
            "logarithm base",
            f"the reference's loss has logarithms to the base {base}, ours natural ones",
            Given(loss.value() / math.log(base)),
        )


@cause(Loss)
def _shifted_targets(loss: Loss, site: SuspectSite) -> Iterator[Candidate]:
    inputs = site.inputs.tokens.target_input
    if inputs.min() >= 0:
        yield Candidate(
            "shifted targets",
            "the reference's loss compares logits with the decoder's inputs instead of its targets",
            loss.but(targets=inputs.astype(np.int64)),
        )
