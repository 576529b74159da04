"""How each family is fed and trained: the publication's way in PyTorch, and our words for it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.parity.references import losses
from flaxformer_mt.training.losses import Convention

ReferenceLoss: TypeAlias = Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
"""Logits [N, V], targets [N], smoothing and padding id, to a sum and what it is divided by."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A publication's loss, learning rate and optimizer, on both sides.

    Recipes are equal if our side is: what is compiled for one serves for the other.
    """

    convention: Convention
    """Our name of its label smoothing."""
    optimizer: OptimizerConfig
    """Our description of its optimizer and schedule."""
    loss: ReferenceLoss = dataclasses.field(compare=False)
    """Its label smoothing."""
    adam: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = dataclasses.field(compare=False)
    """Its optimizer."""
    rate: Callable[[int, int], float] = dataclasses.field(compare=False)
    """Its learning rate, of the update t = 1, 2, ... and D."""
    smoothing: float = 0.1
    """e, on both sides."""
    source_padding: Literal["left", "right"] = "right"
    """Where short source sentences are filled up."""
    counts_tokens: bool = False
    """Positions are counted over real source tokens, not over columns."""


@functools.lru_cache
def recipe(family: str, warmup_steps: int = 4000, num_steps: int = 100_000) -> Recipe:
    """A family's recipe; a family that published none is trained as `torch`.

    Args:
      family: its name.
      warmup_steps: updates in which the rate rises.
      num_steps: all updates, where the schedule depends on that (`questions`).
    """
    return _RECIPES.get(family, _torch)(warmup_steps, num_steps)


def _adam(beta1: float, beta2: float, epsilon: float) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(torch.optim.Adam, betas=(beta1, beta2), eps=epsilon)


def _jadore801120(warmup: int, num_steps: int) -> Recipe:
    return Recipe(
        convention="others",
        loss=losses.jadore801120,
        optimizer=OptimizerConfig(
            schedule="noam", learning_rate=2.0, warmup_steps=warmup, beta2=0.98, epsilon=1e-9
        ),
        adam=_adam(0.9, 0.98, 1e-9),
        rate=lambda t, d_model: losses.noam_rate(t, 2.0, d_model, warmup),
    )


def _annotated(warmup: int, num_steps: int) -> Recipe:
    return Recipe(
        convention="non_pad_kl",
        loss=losses.annotated,
        optimizer=OptimizerConfig(
            schedule="noam", learning_rate=1.0, warmup_steps=warmup, beta2=0.98, epsilon=1e-9
        ),
        adam=_adam(0.9, 0.98, 1e-9),
        rate=lambda t, d_model: losses.noam_rate(t, 1.0, d_model, warmup),
    )


def _questions(warmup: int, num_steps: int) -> Recipe:
    # fastai's Adam: beta1 is moved along with the rate there, which is left out on both sides.
    total = max(num_steps, 10)
    rise = round(0.3 * total)
    return Recipe(
        # Its own loss counts padding as a class to be learned; ours leaves it out, as `annotated`.
        convention="non_pad_kl",
        loss=losses.annotated,
        optimizer=OptimizerConfig(
            schedule="one_cycle",
            learning_rate=1e-3,
            warmup_steps=rise,
            total_steps=total,
            beta2=0.99,
            epsilon=1e-5,
        ),
        adam=_adam(0.9, 0.99, 1e-5),
        rate=lambda t, d_model: losses.one_cycle_rate(t, 1e-3, rise, total),
    )


def _tunz(warmup: int, num_steps: int) -> Recipe:
    return Recipe(
        convention="others_kl",
        loss=losses.tunz,
        optimizer=OptimizerConfig(
            schedule="tensor2tensor",
            learning_rate=2.0,
            warmup_steps=warmup,
            beta2=0.997,
            epsilon=1e-9,
        ),
        adam=_adam(0.9, 0.997, 1e-9),
        rate=lambda t, d_model: losses.tensor2tensor_rate(t, 2.0, d_model, warmup),
    )


def _torch(warmup: int, num_steps: int) -> Recipe:
    """PyTorch's translation tutorial: a constant rate of 1e-4."""
    return Recipe(
        convention="uniform",
        loss=losses.torch_cross_entropy,
        optimizer=OptimizerConfig(
            schedule="constant", learning_rate=1e-4, beta2=0.98, epsilon=1e-9
        ),
        adam=_adam(0.9, 0.98, 1e-9),
        rate=lambda t, d_model: 1e-4,
    )


def _marian(warmup: int, num_steps: int) -> Recipe:
    """Marian's `--lr-warmup W --lr-decay-inv-sqrt W` at the rate of OPUS-MT's recipe."""
    return Recipe(
        convention="uniform",
        loss=losses.torch_cross_entropy,
        optimizer=OptimizerConfig(
            schedule="inverse_square_root",
            learning_rate=3e-4,
            warmup_steps=warmup,
            beta2=0.98,
            epsilon=1e-9,
        ),
        adam=_adam(0.9, 0.98, 1e-9),
        rate=lambda t, d_model: losses.inverse_square_root_rate(t, 3e-4, warmup),
    )


def _fairseq(warmup: int, num_steps: int) -> Recipe:
    return Recipe(
        convention="others",
        loss=losses.fairseq,
        optimizer=OptimizerConfig(
            schedule="inverse_square_root",
            learning_rate=5e-4,
            warmup_steps=warmup,
            beta2=0.98,
            epsilon=1e-8,
        ),
        adam=_adam(0.9, 0.98, 1e-8),
        rate=lambda t, d_model: losses.inverse_square_root_rate(t, 5e-4, warmup),
        source_padding="left",
        counts_tokens=True,
    )


def _opennmt(warmup: int, num_steps: int) -> Recipe:
    """OpenNMT-py's Transformer recipe: `noam` at rate 2, beta2 0.998."""
    return Recipe(
        convention="uniform",
        loss=losses.torch_cross_entropy,
        optimizer=OptimizerConfig(
            schedule="noam", learning_rate=2.0, warmup_steps=warmup, beta2=0.998, epsilon=1e-9
        ),
        adam=_adam(0.9, 0.998, 1e-9),
        rate=lambda t, d_model: losses.noam_rate(t, 2.0, d_model, warmup),
    )


_RECIPES: dict[str, Callable[[int, int], Recipe]] = {
    "jadore801120": _jadore801120,
    "questions": _questions,
    "annotated": _annotated,
    "tunz": _tunz,
    "torch": _torch,
    "marian": _marian,
    "fairseq": _fairseq,
    "opennmt": _opennmt,
}
