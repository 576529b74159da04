"""The training loop: length, loss, validation and checkpoints."""

import dataclasses
from typing import Literal, TypeAlias

from flaxformer_mt.config.fields import require

ValidationMetric: TypeAlias = Literal[
    "loss", "cross_entropy", "perplexity", "accuracy", "bleu", "chrf"
]
"""A figure of a validation; of the first three less is better, of the others more."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, on how much at a time, and what is measured on the way."""

    num_steps: int = 100_000
    """Optimizer steps in all; a run may be continued with more."""
    batch_tokens: int = 4096
    """Target tokens in a batch, padding included; source rows are as many as target rows."""
    accumulation_steps: int = 1
    """Parts in which a batch is computed, one after the other, to save memory."""
    label_smoothing: float = 0.1
    """e: probability taken from the right token."""
    label_smoothing_convention: Literal["uniform", "others", "others_kl", "non_pad_kl"] = "uniform"
    """Who gets e, and what is reported. uniform: all V tokens, e/V each (PyTorch, OpenNMT, Marian);
    others: all but the right one, e/(V-1) each (fairseq, jadore801120); others_kl: the same, less
    that distribution's entropy (tensor2tensor, tunz); non_pad_kl: e/(V-2), padding gets none, less
    the entropy (The Annotated Transformer)."""
    seed: int = 0
    """Initial parameters, dropout and the order of the data follow from it."""
    log_every: int = 50
    """Steps between lines of training figures."""
    eval_every: int = 1000
    """Steps between validations (loss, accuracy, BLEU and chrF of beam search)."""
    eval_sentences: int = 500
    """Validation sentences that are translated for BLEU and chrF; 0 = all."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep_last: int = 2
    """Checkpoints kept because they are the newest."""
    keep_best: int = 1
    """Checkpoints kept because they are the best by best_metric."""
    best_metric: ValidationMetric = "loss"
    """Validation figure that ranks checkpoints."""
    early_stopping_patience: int = 0
    """Stop after this many validations in a row that did not improve; 0 = never."""
    early_stopping_metric: ValidationMetric = "loss"
    """Validation figure that must improve."""
    early_stopping_min_delta: float = 0.0
    """What counts as an improvement: more than this."""
    ema_decay: float = 0.0
    """d: validate and translate with an exponential moving average of the parameters, average = d
    * average + (1 - d) * parameters after each step; 0 = with the parameters themselves."""
    r_drop: float = 0.0
    """alpha of R-Drop (Liang et al. 2021): each batch is computed twice, with different dropout,
    and the two predictions are drawn together; 0 = off, 5 is usual for translation."""
    max_skipped_steps: int = 10
    """A step whose loss or gradient is not finite changes nothing; after this many in a row the
    run stops at its last checkpoint."""
    init_from: str = ""
    """Start from these parameters: a run folder (its best checkpoint, and its vocabulary), or a
    .safetensors file made by `flaxformer-mt convert --to flaxformer_mt`."""
    freeze: tuple[str, ...] = ()
    """Regular expressions; parameters whose path one of them matches are not trained: "encoder/",
    "embedding"."""
    show_translations: int = 5
    """Test translations printed at the end."""

    def __post_init__(self) -> None:
        for name in (
            "num_steps", "batch_tokens", "accumulation_steps", "log_every", "eval_every",
            "checkpoint_every", "keep_last",
        ):  # fmt: skip
            require(getattr(self, name) > 0, f"train.{name} must be positive")
        for name in (
            "eval_sentences", "keep_best", "show_translations", "early_stopping_patience",
            "early_stopping_min_delta", "r_drop",
        ):  # fmt: skip
            require(getattr(self, name) >= 0, f"train.{name} must not be negative")
        require(0 <= self.label_smoothing < 1, "train.label_smoothing must be in [0, 1)")
        require(0 <= self.ema_decay < 1, "train.ema_decay must be in [0, 1)")
        require(self.max_skipped_steps > 0, "train.max_skipped_steps must be positive")
