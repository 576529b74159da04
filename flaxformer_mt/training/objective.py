"""The objective of a run, from its configuration or from the user."""

from collections.abc import Callable
from typing import Any, TypeAlias

from flax import linen as nn

from flaxformer_mt.config import TrainConfig
from flaxformer_mt.objectives.cross_entropy import Objective, Sums, cross_entropy
from flaxformer_mt.objectives.distillation import Distillation
from flaxformer_mt.objectives.guided_alignment import guided_alignment
from flaxformer_mt.objectives.r_drop import RDrop

UserObjective: TypeAlias = Callable[..., Sums]
"""Called as `objective(config, params, batch, key, frozen)`, see `Objective`; `config` is that of
the model."""

CROSS_ENTROPY = TrainConfig.objective
"""The name of the objectives that `make_objective` makes."""


def make_objective(
    model: nn.Module, config: TrainConfig, teacher: nn.Module | None = None
) -> Objective:
    """Makes the objective of a configuration: cross-entropy, and at most one further loss.

    `teacher` is the model of `config.teacher`, whose parameters are the objective's frozen tree.
    """
    options: dict[str, Any] = {
        "smoothing": config.label_smoothing,
        "convention": config.label_smoothing_convention,
        "z_loss": config.z_loss,
    }
    if config.guided_alignment_weight:
        options["weight"] = config.guided_alignment_weight
        options["layer"] = config.guided_alignment_layer
        return lambda params, batch, key, frozen: guided_alignment(
            model, params, batch, key, **options
        )
    if config.r_drop:
        options["term"] = RDrop(config.r_drop)
    elif config.teacher:
        options["term"] = Distillation(config.distillation_weight, config.distillation_temperature)
    return lambda params, batch, key, frozen: cross_entropy(
        model, params, batch, key, teacher=None if teacher is None else (teacher, frozen), **options
    )
