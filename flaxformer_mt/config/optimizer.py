"""The optimizer and its learning-rate schedule."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from flaxformer_mt.config.fields import Checked, FieldRole, option


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimizer and its learning rate."""

    kind: Literal["adam", "adamw", "adafactor"] = option("adam", FieldRole.TRAINING)
    """adamw adds decoupled weight decay. adafactor keeps only row and column means of large
    matrices, and multiplies the learning rate by the root mean square of each parameter (T5: 1e-2);
    it has no beta1, beta2 and epsilon."""
    learning_rate: float = option(1e-3, FieldRole.TRAINING, above=0, limit=1e6)
    """Peak learning rate of constant, inverse_square_root and one_cycle; factor of noam and
    tensor2tensor."""
    schedule: Literal["constant", "inverse_square_root", "noam", "tensor2tensor", "one_cycle"] = (
        option("inverse_square_root", FieldRole.TRAINING)
    )
    """Learning rate at step t. inverse_square_root: linear up to the peak at w, then peak *
    sqrt(w/t); noam: factor * D^-0.5 * min(t^-0.5, t * w^-1.5); tensor2tensor: factor * D^-0.5 *
    min(1, t/w) * max(t, w)^-0.5; one_cycle: cosine up to the peak and down to nearly 0 at
    total_steps."""
    warmup_steps: int = option(4000, FieldRole.TRAINING, lowest=0)
    """w: number of steps over which the learning rate rises; constant ignores it, one_cycle needs
    it."""
    total_steps: int = option(0, FieldRole.TRAINING, lowest=0)
    """Length of a one_cycle schedule; 0 = train.num_steps."""
    beta1: float = option(0.9, FieldRole.TRAINING, lowest=0, below=1)
    """Decay rate of Adam's first moment."""
    beta2: float = option(0.98, FieldRole.TRAINING, lowest=0, below=1)
    """Decay rate of Adam's second moment."""
    epsilon: float = option(1e-9, FieldRole.TRAINING, lowest=0, limit=1)
    """Adam's epsilon, added outside the square root."""
    weight_decay: float = option(0.0, FieldRole.TRAINING, lowest=0, limit=1e6)
    """Decoupled weight decay of adamw."""
    clip_norm: float = option(0.0, FieldRole.TRAINING, lowest=0)
    """Clip gradients to this global norm; 0 = no clipping."""

    _prefix = "optimizer."

    def _problems(self) -> Iterator[str]:
        if self.weight_decay and self.kind != "adamw":
            yield "optimizer.weight_decay needs optimizer.kind=adamw"
