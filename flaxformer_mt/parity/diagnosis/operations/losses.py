"""The label-smoothed loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from flaxformer_mt.parity.diagnosis.operations.base import Operation
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


@dataclasses.dataclass(frozen=True, eq=False)
class Loss(Operation):
    """The label-smoothed cross-entropy of logits [B, T, V], a scalar."""

    logits: np.ndarray
    targets: np.ndarray
    convention: str
    """A key of `CONVENTIONS`."""
    smoothing: float
    pad_id: int
    """Targets that are ignored; `NO_PADDING` = none."""
    reduction: str = "mean over tokens"
    """A key of `REDUCTIONS`."""

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The summed loss and the number of tokens of each sentence, [B] and [B]."""
        loss, sums = LOSSES[CONVENTIONS[self.convention]], np.empty((2, len(self.targets)))
        for row, (logits, targets) in enumerate(zip(self.logits, self.targets, strict=True)):
            tensors = torch.tensor(logits), torch.tensor(targets)
            sums[:, row] = [float(x) for x in loss(*tensors, self.smoothing, self.pad_id)]
        return sums[0], sums[1]

    def value(self) -> np.ndarray:
        """A scalar."""
        return np.asarray(REDUCTIONS[self.reduction](*self.sums(), self.targets.size))


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
