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
    optimizer: OptimizerConfig
    loss: ReferenceLoss = dataclasses.field(compare=False)
    adam: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = dataclasses.field(compare=False)
    rate: Callable[[int, int], float] = dataclasses.field(compare=False)
    """The published learning rate, of the update t = 1, 2, ... and D."""
    smoothing: float = 0.1
    source_padding: Literal["left", "right"] = "right"
    """The side on which source sentences are padded."""
    counts_tokens: bool = False
    """Count positions over real source tokens instead of columns."""


@functools.lru_cache
def recipe(family: str, warmup_steps: int = 4000, num_steps: int = 100_000) -> Recipe:
    """Returns the recipe of a family, by default that of `torch`.

    Warm-up and total are numbers of updates; one-cycle schedules depend on the total.
    """
    warmup = warmup_steps
    match canonical_family(family):
        case "jadore801120":
            return _noam("others", losses.jadore801120, 2.0, warmup)
        case "annotated":
            return _noam("non_pad_kl", losses.annotated, 1.0, warmup)
        case "annotated_wide_heads":
            return _annotated_wide_heads(num_steps)
        case "tunz":
            return _tunz(warmup)
        case "opennmt":  # OpenNMT-py's recipe of Transformers.
            return _noam("uniform", losses.torch_cross_entropy, 2.0, warmup, beta2=0.998)
        case "marian":  # `--lr-warmup W --lr-decay-inv-sqrt W` at the rate of OPUS-MT's recipe.
            return _inverse_square_root("uniform", losses.torch_cross_entropy, 3e-4, warmup)
        case "fairseq":
            return _inverse_square_root(
                "others",
                losses.fairseq,
                5e-4,
                warmup,
                epsilon=1e-8,
                source_padding="left",
                counts_tokens=True,
            )
        case _:  # PyTorch's translation tutorial.
            return _recipe(
                "uniform",
                losses.torch_cross_entropy,
                lambda t, d_model: 1e-4,
                schedule="constant",
                learning_rate=1e-4,
            )


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
    return Recipe(
        convention=convention,
        optimizer=OptimizerConfig(beta1=0.9, beta2=beta2, epsilon=epsilon, **schedule),
        loss=loss,
        adam=functools.partial(torch.optim.Adam, betas=(0.9, beta2), eps=epsilon),
        rate=rate,
        source_padding=source_padding,
        counts_tokens=counts_tokens,
    )


def _noam(
    convention: Convention, loss: ReferenceLoss, rate: float, warmup: int, beta2: float = 0.98
) -> Recipe:
    return _recipe(
        convention,
        loss,
        lambda t, d_model: losses.noam_rate(t, rate, d_model, warmup),
        beta2=beta2,
        schedule="noam",
        learning_rate=rate,
        warmup_steps=warmup,
    )


def _inverse_square_root(
    convention: Convention, loss: ReferenceLoss, rate: float, warmup: int, **options: Any
) -> Recipe:
    return _recipe(
        convention,
        loss,
        lambda t, d_model: losses.inverse_square_root_rate(t, rate, warmup),
        schedule="inverse_square_root",
        learning_rate=rate,
        warmup_steps=warmup,
        **options,
    )


def _annotated_wide_heads(num_steps: int) -> Recipe:
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


def _tunz(warmup: int) -> Recipe:
    return _recipe(
        "others_kl",
        losses.tunz,
        lambda t, d_model: losses.tensor2tensor_rate(t, 2.0, d_model, warmup),
        beta2=0.997,
        schedule="tensor2tensor",
        learning_rate=2.0,
        warmup_steps=warmup,
    )
