"""The optimizer and its learning-rate schedule."""

import dataclasses
from typing import Literal

from flaxformer_mt.config.fields import require


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning rate."""

    kind: Literal["adam", "adamw"] = "adam"
    """adamw adds decoupled weight decay."""
    learning_rate: float = 1e-3
    """Peak rate of constant, inverse_square_root and one_cycle; factor of noam and
    tensor2tensor."""
    schedule: Literal["constant", "inverse_square_root", "noam", "tensor2tensor", "one_cycle"] = (
        "inverse_square_root"
    )
    """inverse_square_root: linear to the peak at w, then peak * sqrt(w/t); noam: factor * D^-0.5 *
    min(t^-0.5, t * w^-1.5); tensor2tensor: factor * D^-0.5 * min(1, t/w) * max(t, w)^-0.5;
    one_cycle: cosine up to the peak and down to nearly 0 at total_steps."""
    warmup_steps: int = 4000
    """w: steps over which the rate rises."""
    total_steps: int = 0
    """Length of a one_cycle schedule; 0 = train.num_steps."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.98
    """Decay of Adam's second moment."""
    epsilon: float = 1e-9
    """Added outside the root."""
    weight_decay: float = 0.0
    """Decoupled weight decay of adamw."""
    clip_norm: float = 0.0
    """Scale gradients down to this global norm; 0 = never."""

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "optimizer.learning_rate must be positive")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps must not be negative")
        require(
            self.weight_decay == 0 or self.kind == "adamw",
            "optimizer.weight_decay needs optimizer.kind=adamw",
        )
