"""How families are trained: as published, in PyTorch, and the equivalent configuration.

The families `double_projection`, `mbart`, `m2m100` and `t5` have the recipe of `torch`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from flaxformer_mt.config import OptimizerConfig
from flaxformer_mt.objectives.losses import Convention
from flaxformer_mt.parity.references import losses
from flaxformer_mt.presets import canonical_family

ReferenceLoss: TypeAlias = Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
"""Maps logits [N, V], targets [N], smoothing and padding id to a sum and its normalizer."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The published loss, schedule and optimizer, and their equivalents in our configuration.

    Recipes compare equal if our side is equal, so that compiled programs are shared.
    """

    convention: Convention
    """Our convention of label smoothing."""
    optimizer: OptimizerConfig
    """Our optimizer and schedule."""
    loss: ReferenceLoss = dataclasses.field(compare=False)
    """The published loss."""
    adam: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = dataclasses.field(compare=False)
    """The published optimizer."""
    rate: Callable[[int, int], float] = dataclasses.field(compare=False)
    """The published learning rate, of the update t = 1, 2, ... and D."""
    smoothing: float = 0.1
    """e of the label smoothing, on both sides."""
    source_padding: Literal["left", "right"] = "right"
    """The side on which source sentences are padded."""
    counts_tokens: bool = False
    """Count positions over real source tokens instead of columns."""


@functools.lru_cache
def recipe(family: str, warmup_steps: int = 4000, num_steps: int = 100_000) -> Recipe:
    """Returns the recipe of a family, by default that of `torch`.

    Args:
      family: its name.
      warmup_steps: the number of warm-up updates.
      num_steps: the total number of updates, on which one-cycle schedules depend.
    """
    return _RECIPES.get(canonical_family(family), _torch)(warmup_steps, num_steps)


def _recipe(
    convention: Convention,
    loss: ReferenceLoss,
    rate: Callable[[int, int], float],
    beta2: float = 0.98,
    epsilon: float = 1e-9,
    source_padding: Literal["left", "right"] = "right",
    counts_tokens: bool = False,
    **schedule: Any,
) -> Recipe:
    """Returns a recipe with Adam; `schedule` has further fields of our `OptimizerConfig`."""
    return Recipe(
        convention=convention,
        optimizer=OptimizerConfig(beta1=0.9, beta2=beta2, epsilon=epsilon, **schedule),
        loss=loss,
        adam=functools.partial(torch.optim.Adam, betas=(0.9, beta2), eps=epsilon),
        rate=rate,
        source_padding=source_padding,
        counts_tokens=counts_tokens,
    )


def _jadore801120(warmup: int, num_steps: int) -> Recipe:
    return _recipe(
        "others",
        losses.jadore801120,
        lambda t, d_model: losses.noam_rate(t, 2.0, d_model, warmup),
        schedule="noam",
        learning_rate=2.0,
        warmup_steps=warmup,
    )


def _annotated(warmup: int, num_steps: int) -> Recipe:
    return _recipe(
        "non_pad_kl",
        losses.annotated,
        lambda t, d_model: losses.noam_rate(t, 1.0, d_model, warmup),
        schedule="noam",
        learning_rate=1.0,
        warmup_steps=warmup,
    )


def _annotated_wide_heads(warmup: int, num_steps: int) -> Recipe:
    # fastai also schedules Adam's beta1, which is omitted on both sides.
    total = max(num_steps, 10)
    rise = round(0.3 * total)
    return _recipe(
        # The published loss treats padding as a class; ours ignores it, as `annotated` does.
        "non_pad_kl",
        losses.annotated,
        lambda t, d_model: losses.one_cycle_rate(t, 1e-3, rise, total),
        beta2=0.99,
        epsilon=1e-5,
        schedule="one_cycle",
        learning_rate=1e-3,
        warmup_steps=rise,
        total_steps=total,
    )


def _tunz(warmup: int, num_steps: int) -> Recipe:
    return _recipe(
        "others_kl",
        losses.tunz,
        lambda t, d_model: losses.tensor2tensor_rate(t, 2.0, d_model, warmup),
        beta2=0.997,
        schedule="tensor2tensor",
        learning_rate=2.0,
        warmup_steps=warmup,
    )


def _torch(warmup: int, num_steps: int) -> Recipe:
    """PyTorch's translation tutorial: a constant rate of 1e-4."""
    return _recipe(
        "uniform",
        losses.torch_cross_entropy,
        lambda t, d_model: 1e-4,
        schedule="constant",
        learning_rate=1e-4,
    )


def _marian(warmup: int, num_steps: int) -> Recipe:
    """Marian's `--lr-warmup W --lr-decay-inv-sqrt W` at the rate of OPUS-MT's recipe."""
    return _recipe(
        "uniform",
        losses.torch_cross_entropy,
        lambda t, d_model: losses.inverse_square_root_rate(t, 3e-4, warmup),
        schedule="inverse_square_root",
        learning_rate=3e-4,
        warmup_steps=warmup,
    )


def _fairseq(warmup: int, num_steps: int) -> Recipe:
    return _recipe(
        "others",
        losses.fairseq,
        lambda t, d_model: losses.inverse_square_root_rate(t, 5e-4, warmup),
        epsilon=1e-8,
        schedule="inverse_square_root",
        learning_rate=5e-4,
        warmup_steps=warmup,
        source_padding="left",
        counts_tokens=True,
    )


def _opennmt(warmup: int, num_steps: int) -> Recipe:
    """OpenNMT-py's Transformer recipe: `noam` at rate 2, beta2 0.998."""
    return _recipe(
        "uniform",
        losses.torch_cross_entropy,
        lambda t, d_model: losses.noam_rate(t, 2.0, d_model, warmup),
        beta2=0.998,
        schedule="noam",
        learning_rate=2.0,
        warmup_steps=warmup,
    )


_RECIPES: dict[str, Callable[[int, int], Recipe]] = {
    "jadore801120": _jadore801120,
    "annotated_wide_heads": _annotated_wide_heads,
    "annotated": _annotated,
    "tunz": _tunz,
    "torch": _torch,
    "marian": _marian,
    "fairseq": _fairseq,
    "opennmt": _opennmt,
}
