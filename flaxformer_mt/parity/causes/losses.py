"""Causes in the loss: another convention of label smoothing, reduction, padding or logarithm."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flaxformer_mt.parity.program.diagnosis import (
    Diagnosis,
    Found,
    combinations,
    relative_difference,
)
from flaxformer_mt.parity.references.losses import LOSSES

CONVENTIONS = {
    "uniform": "torch",
    "others": "jadore801120",
    "others_kl": "tunz",
    "non_pad_kl": "annotated",
    "annotated_wide_heads": "annotated_wide_heads",
}
"""A family for each convention of label smoothing; the last counts padding as a class."""

NO_PADDING = -100
"""A padding id that matches no target."""

REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], Any]] = {
    "mean over tokens": lambda losses, counts, size: losses.sum() / counts.sum(),
    "sum over tokens": lambda losses, counts, size: losses.sum(),
    "sum over tokens, divided by sentences": lambda losses, counts, size: losses.mean(),
    "mean over sentences of their means": lambda losses, counts, size: (losses / counts).mean(),
    "sum over tokens, divided by tokens and padding": lambda losses, counts, size: (
        losses.sum() / size
    ),
}
"""How the losses and token counts of the sentences, and B*T, are reduced; the first is ours."""

_NAMES = {
    "convention": "label-smoothing convention",
    "smoothing": "smoothing amount",
    "pad_id": "padding in the loss",
    "reduction": "loss reduction",
}


def another_loss(
    logits: np.ndarray, targets: np.ndarray, inputs: np.ndarray, expected: float, **ours: Any
) -> Found:
    """Yields the causes of another loss of logits [B, T, V] and targets int [B, T].

    `inputs` are those of the decoder; `ours` are the convention, the smoothing and the padding id.
    """

    def diagnosis(cause: str, words: str, loss: float) -> Diagnosis:
        residual = relative_difference(np.asarray(loss), np.asarray(expected))
        return Diagnosis(cause, f"the reference's loss {words}", residual)

    own = {**ours, "reduction": "mean over tokens"}
    choices: dict[str, list[Any]] = {
        "convention": [*CONVENTIONS],
        "smoothing": [0.0, 0.1, 0.05, 0.15, 0.2, 0.3],
        "pad_id": [NO_PADDING],
        "reduction": [*REDUCTIONS],
    }
    for change in combinations(own, choices, most=2):
        settings = {**own, **change}
        # Two conventions label padding as a class of its own.
        labels_padding = settings["convention"] in ("non_pad_kl", "annotated_wide_heads")
        if settings["pad_id"] == NO_PADDING and labels_padding:
            continue
        words = ", ".join(
            "padding counted in"
            if name == "pad_id"
            else f"{_NAMES[name]} {value} in place of {own[name]}"
            for name, value in change.items()
        )
        cause = " and ".join(_NAMES[name] for name in change)
        yield diagnosis(cause, f"has {words}", _loss(logits, targets, **settings))
    loss = _loss(logits, targets, **own)
    for base in (2, 10):
        words = f"has logarithms to the base {base}, ours natural ones"
        yield diagnosis("logarithm base", words, loss / math.log(base))
    if inputs.min() >= 0:
        words = "compares logits with the decoder's inputs instead of its targets"
        yield diagnosis("shifted targets", words, _loss(logits, inputs, **own))


def _loss(
    logits: np.ndarray,
    targets: np.ndarray,
    convention: str,
    smoothing: float,
    pad_id: int,
    reduction: str,
) -> float:
    loss, sums = LOSSES[CONVENTIONS[convention]], np.empty((2, len(targets)))
    for row, (z, y) in enumerate(zip(logits, targets.astype(np.int64), strict=True)):
        found = loss(torch.tensor(z), torch.tensor(y), smoothing, pad_id)
        sums[:, row] = [float(x) for x in found]
    return float(REDUCTIONS[reduction](sums[0], sums[1], targets.size))
