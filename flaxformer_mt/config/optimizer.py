"""The optimizer and its learning-rate schedule."""

import dataclasses
from collections.abc import Collection
from typing import Literal

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import Checked, FieldRole, option

KINDS = ("adam", "adamw", "adafactor", "muon")
"""The built-in optimizers."""


@dataclasses.dataclass(frozen=True, repr=False)
class OptimizerConfig(Checked):
    """The optimizer and its learning rate."""

    kind: str = option("adam", FieldRole.TRAINING)
    """adam, adamw, adafactor or muon. adamw adds decoupled weight decay. adafactor keeps only row
    and column means of large matrices, and multiplies the learning rate by the root mean square of
    each parameter (T5: 1e-2); it has no beta1, beta2 and epsilon. muon orthogonalizes the updates
    of the matrices of layers, and trains the other parameters by adamw with the same learning rate.
    Other names are those of
    functions given to `flaxformer_mt.train(optimizer=...)`, which records them here."""
    constants: tuple[str, ...] = option((), FieldRole.TRAINING)
    """The functions and constants of such an optimizer, which `flaxformer_mt.train` records."""
    learning_rate: float = option(1e-3, FieldRole.TRAINING, above=0, limit=1e6)
    """Factor of noam and tensor2tensor; peak learning rate of all other schedules."""
    schedule: Literal[
        "constant", "inverse_square_root", "noam", "tensor2tensor", "one_cycle", "linear", "cosine",
        "warmup_stable_decay",
    ] = option("inverse_square_root", FieldRole.TRAINING)  # fmt: skip
    """Learning rate at step t. inverse_square_root: linear up to the peak at w, then peak *
    sqrt(w/t); noam: factor * D^-0.5 * min(t^-0.5, t * w^-1.5); tensor2tensor: factor * D^-0.5 *
    min(1, t/w) * max(t, w)^-0.5; one_cycle: cosine up to the peak and down to nearly 0 at
    total_steps; linear, cosine: linear up to the peak at w, then down to 0 after total_steps;
    warmup_stable_decay (WSD): the same, but the peak lasts until a linear decay."""
    warmup_steps: int = option(4000, FieldRole.TRAINING, lowest=0)
    """w: number of steps over which the learning rate rises; constant ignores it, one_cycle needs
    it."""
    warmup: float = option(0.0, FieldRole.TRAINING, lowest=0, below=1)
    """w as a share of total_steps, instead of warmup_steps: at most one of them is given."""
    total_steps: int = option(0, FieldRole.TRAINING, lowest=0)
    """Length of one_cycle, linear, cosine and warmup_stable_decay, and what warmup is a share of; 0
    = train.num_steps; for schedules without an end, as it was when the run began."""
    decay: float = option(0.2, FieldRole.TRAINING, above=0, highest=1)
    """Share of total_steps, at their end, over which warmup_stable_decay falls; other schedules
    ignore it."""
    beta1: float = option(0.9, FieldRole.TRAINING, lowest=0, below=1)
    """Decay rate of Adam's first moment."""
    beta2: float = option(0.98, FieldRole.TRAINING, lowest=0, below=1)
    """Decay rate of Adam's second moment."""
    epsilon: float = option(1e-9, FieldRole.TRAINING, lowest=0, limit=1)
    """Adam's epsilon, added outside the square root."""
    weight_decay: float = option(0.0, FieldRole.TRAINING, lowest=0, limit=1e6)
    """Decoupled weight decay of adamw and muon."""
    momentum: float = option(0.95, FieldRole.TRAINING, lowest=0, below=1)
    """Decay rate of muon's momentum; the parameters that adamw trains have beta1 and beta2."""
    clip_norm: float = option(0.0, FieldRole.TRAINING, lowest=0)
    """Clip gradients to this global norm; 0 = no clipping."""

    _prefix = "optimizer."
    _relations = relations.OPTIMIZER

    @property
    def schedule_has_end(self) -> bool:
        """Whether the learning rate of every step depends on `total_steps`."""
        return self.schedule in ("one_cycle", "linear", "cosine", "warmup_stable_decay")

    def without_other_warmup(self, given: Collection[str]) -> "OptimizerConfig":
        """Returns the configuration without the warm-up that is replaced if fields are given."""
        if "warmup_steps" in given:
            return dataclasses.replace(self, warmup=0.0)
        if "warmup" in given:
            return dataclasses.replace(self, warmup_steps=OptimizerConfig.warmup_steps)
        return self
