"""The published losses and learning rates, in PyTorch and in plain Python.

A loss takes logits [N, V], targets [N], the smoothing e and the padding id, and returns its sum and
the number of tokens that it is divided by. A rate takes t = 1, 2, ..., the number of the update.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def jadore801120(logits: Tensor, targets: Tensor, e: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """1 - e on the target, e / (V - 1) on every other class; padding targets are ignored."""
    one_hot = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    smoothed = one_hot * (1 - e) + (1 - one_hot) * e / (logits.shape[1] - 1)
    losses = -(smoothed * F.log_softmax(logits, dim=1)).sum(dim=1)
    not_pad = targets != pad_id
    return losses[not_pad].sum(), not_pad.sum()


def annotated(logits: Tensor, targets: Tensor, e: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """Divergence from 1 - e on the target, 0 on padding, e / (V - 2) elsewhere."""
    smoothed = _other_classes(logits, e, pad_id).scatter(1, targets.unsqueeze(1), 1 - e)
    smoothed[targets == pad_id] = 0
    divergence = F.kl_div(F.log_softmax(logits, dim=1), smoothed, reduction="sum")
    return divergence, (targets != pad_id).sum()


def annotated_wide_heads(
    logits: Tensor, targets: Tensor, e: float, pad_id: int
) -> tuple[Tensor, Tensor]:
    """As `annotated`, but one smoothed row serves all targets, and padding counts as a class."""
    smoothed = _other_classes(logits, e, pad_id).scatter(1, targets.unsqueeze(1), 1 - e)
    divergence = F.kl_div(F.log_softmax(logits, dim=1), smoothed, reduction="sum")
    return divergence, torch.tensor(len(targets))


def _other_classes(logits: Tensor, e: float, pad_id: int) -> Tensor:
    if pad_id < 0:  # No class is padding.
        return torch.full_like(logits, e / (logits.shape[1] - 1))
    smoothed = torch.full_like(logits, e / (logits.shape[1] - 2))
    smoothed[:, pad_id] = 0
    return smoothed


def tunz(logits: Tensor, targets: Tensor, e: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """As `jadore801120`, less the entropy of the smoothed label (with 1e-20 inside its log)."""
    low = e / (logits.shape[1] - 1)
    entropy = -((1 - e) * math.log(1 - e) + (logits.shape[1] - 1) * low * math.log(low + 1e-20))
    loss, tokens = jadore801120(logits, targets, e, pad_id)
    return loss - tokens.item() * entropy, tokens


def torch_cross_entropy(
    logits: Tensor, targets: Tensor, e: float, pad_id: int
) -> tuple[Tensor, Tensor]:
    """1 - e + e / V on the target, e / V elsewhere: `torch`, OpenNMT-py and Marian."""
    loss = F.cross_entropy(logits, targets, ignore_index=pad_id, reduction="sum", label_smoothing=e)
    return loss, (targets != pad_id).sum()


def fairseq(logits: Tensor, targets: Tensor, e: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """(1 - e) times the target's loss, e / (V - 1) times the sum of all others'."""
    log_probabilities = F.log_softmax(logits, dim=1)
    not_pad = targets != pad_id
    right = -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)[not_pad].sum()
    every = -log_probabilities.sum(dim=1)[not_pad].sum()
    other = e / (logits.shape[1] - 1)
    return (1 - e - other) * right + other * every, not_pad.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]] = {
    "jadore801120": jadore801120,
    "annotated": annotated,
    "annotated_wide_heads": annotated_wide_heads,
    "tunz": tunz,
    "torch": torch_cross_entropy,
    "fairseq": fairseq,
}


def noam_rate(t: int, factor: float, d_model: int, warmup: int) -> float:
    """`jadore801120` and `annotated`."""
    return factor * d_model**-0.5 * min(t**-0.5, t * warmup**-1.5)


def tensor2tensor_rate(t: int, factor: float, d_model: int, warmup: int) -> float:
    """`tunz`, with factor 2."""
    return factor * d_model**-0.5 * min(1, t / warmup) * max(t, warmup) ** -0.5


def inverse_square_root_rate(t: int, peak: float, warmup: int) -> float:
    """`fairseq`, from an initial rate of 0."""
    if t < warmup:
        return t * peak / warmup
    return peak * warmup**0.5 * t**-0.5


def one_cycle_rate(t: int, peak: float, warmup: int, total: int) -> float:
    """`annotated_wide_heads`, by fastai: half cosines from peak/25 to the peak to peak/250,000."""

    def anneal(start: float, end: float, share: float) -> float:
        return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

    done = t - 1
    if done <= warmup:
        return anneal(peak / 25, peak, done / warmup)
    return anneal(peak, peak / 250_000, (done - warmup) / (total - warmup))
