"""How families are trained: as published, in PyTorch, and the equivalent configuration.

The families `double_projection`, `mbart`, `m2m100` and `t5` have the recipe of `torch`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

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


class _Published(NamedTuple):
    convention: Convention
    loss: ReferenceLoss
    schedule: str
    learning_rate: float
    beta2: float = 0.98
    epsilon: float = 1e-9


_RECIPES = {
    # PyTorch's translation tutorial.
    "torch": _Published("uniform", losses.torch_cross_entropy, "constant", 1e-4),
    "jadore801120": _Published("others", losses.jadore801120, "noam", 2.0),
    "annotated": _Published("non_pad_kl", losses.annotated, "noam", 1.0),
    # The published loss treats padding as a class; ours ignores it, as `annotated` does. fastai
    # also schedules Adam's beta1, which is omitted on both sides.
    "annotated_wide_heads": _Published(
        "non_pad_kl", losses.annotated, "one_cycle", 1e-3, beta2=0.99, epsilon=1e-5
    ),
    "tunz": _Published("others_kl", losses.tunz, "tensor2tensor", 2.0, beta2=0.997),
    # OpenNMT-py's recipe of Transformers.
    "opennmt": _Published("uniform", losses.torch_cross_entropy, "noam", 2.0, beta2=0.998),
    # `--lr-warmup W --lr-decay-inv-sqrt W` at the rate of OPUS-MT's recipe.
    "marian": _Published("uniform", losses.torch_cross_entropy, "inverse_square_root", 3e-4),
    "fairseq": _Published("others", losses.fairseq, "inverse_square_root", 5e-4, epsilon=1e-8),
}


@functools.lru_cache
def recipe(family: str, warmup_steps: int = 4000, num_steps: int = 100_000) -> Recipe:
    """Returns the recipe of a family; one-cycle schedules depend on the total of updates."""
    name = canonical_family(family)
    its = _RECIPES.get(name, _RECIPES["torch"])
    steps: dict[str, int] = {}
    if its.schedule == "one_cycle":
        total = max(num_steps, 10)
        steps = {"warmup_steps": round(0.3 * total), "total_steps": total}
    elif its.schedule != "constant":
        steps = {"warmup_steps": warmup_steps}
    schedule: Any = {"schedule": its.schedule, "learning_rate": its.learning_rate} | steps
    optimizer = OptimizerConfig(beta1=0.9, beta2=its.beta2, epsilon=its.epsilon, **schedule)
    is_fairseq = name == "fairseq"
    return Recipe(
        convention=its.convention,
        optimizer=optimizer,
        loss=its.loss,
        adam=functools.partial(torch.optim.Adam, betas=(0.9, its.beta2), eps=its.epsilon),
        rate=functools.partial(_rate, optimizer),
        source_padding="left" if is_fairseq else "right",
        counts_tokens=is_fairseq,
    )


def _rate(config: OptimizerConfig, t: int, d_model: int) -> float:
    peak, warmup = config.learning_rate, config.warmup_steps
    match config.schedule:
        case "noam":
            return losses.noam_rate(t, peak, d_model, warmup)
        case "tensor2tensor":
            return losses.tensor2tensor_rate(t, peak, d_model, warmup)
        case "inverse_square_root":
            return losses.inverse_square_root_rate(t, peak, warmup)
        case "one_cycle":
            return losses.one_cycle_rate(t, peak, warmup, config.total_steps or 0)
        case _:
            return peak
