"""The training loop: length, loss, validation and checkpoints; and the devices that it runs on."""

import dataclasses
import math
import re
from typing import Literal, TypeAlias

from flaxformer_mt.config import relations
from flaxformer_mt.config.fields import MAX_LAYERS, MAX_SEED, Checked, FieldRole, option

ValidationMetric: TypeAlias = Literal[
    "loss", "cross_entropy", "perplexity", "accuracy", "bleu", "chrf"
]
"""A metric of a validation. Lower is better for the first three, higher for the others."""


TeacherForcedMetric: TypeAlias = Literal["seq2seq_acc", "teacher_forced_bleu"]
"""A metric of the tokens that are most probable after the reference's preceding tokens."""


TrackerName: TypeAlias = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclasses.dataclass(frozen=True, repr=False)
class TrainConfig(Checked):
    """Length of training, batches, loss, validation and checkpoints."""

    num_steps: int = option(100_000, FieldRole.RUNNING, lowest=1)
    """Total number of optimizer steps; a run may be continued with more."""
    batch_tokens: int = option(4096, FieldRole.ROWS, lowest=1)
    """Target tokens per batch, padding included; there are as many source rows as target rows."""
    accumulation_steps: int = option(1, FieldRole.NUMERICS, lowest=1)
    """Number of micro-batches that a batch is computed in sequentially, to save memory."""
    objective: str = option("cross_entropy", FieldRole.TRAINING)
    """What is minimized. cross_entropy, to which r_drop or teacher add a term; other names are
    those of functions given to `flaxformer_mt.train(objective=...)`, which records them here."""
    label_smoothing: float = option(0.1, FieldRole.TRAINING, lowest=0, below=1)
    """e: probability moved from the correct token to others."""
    label_smoothing_convention: Literal["uniform", "others", "others_kl", "non_pad_kl"] = option(
        "uniform", FieldRole.TRAINING
    )
    """Which tokens share e, and which loss is reported. uniform: all V tokens, e/V each (PyTorch,
    OpenNMT, Marian); others: all but the correct one, e/(V-1) each (fairseq, jadore801120);
    others_kl: the same, minus the entropy of the smoothed distribution (tensor2tensor, tunz);
    non_pad_kl: all but the correct one and padding, e/(V-2) each, minus the entropy (The Annotated
    Transformer)."""
    seed: int = option(
        0,
        FieldRole.INITIALIZATION,
        FieldRole.TRAINING,
        FieldRole.ROWS,
        lowest=0,
        limit=MAX_SEED,
    )
    """Random seed of the initial parameters, dropout and the order of the data."""
    dropout_generator: Literal["threefry", "rbg"] = option("threefry", FieldRole.NUMERICS)
    """Where the random numbers of dropout come from. threefry: a function of the seed, the step and
    the position, the same on every device and mesh; rbg: the device's own generator, which costs
    less, and differs between kinds of devices, meshes and versions of XLA."""
    log_every: int = option(50, FieldRole.RUNNING, lowest=1)
    """Steps between reports of training metrics."""
    trackers: tuple[TrackerName, ...] = option(("tensorboard",), FieldRole.RUNNING)
    """Experiment trackers that get configuration, metrics, translations and devices, besides
    metrics.jsonl. What is not online (docs/training.md) is written to the run folder."""
    profile_steps: str = option("", FieldRole.RUNNING)
    """A:B: write a trace of the steps A to B, both included and counted from 1, to the folder
    profile/ of the run; empty = none."""
    eval_every: int = option(1000, FieldRole.RUNNING, lowest=1)
    """Steps between validations (loss, accuracy, and BLEU and chrF of beam search)."""
    eval_sentences: int = option(500, FieldRole.RUNNING, lowest=0)
    """Validation sentences translated for BLEU and chrF, of several corpora in proportion to their
    sizes; the same random ones at every validation, of every run on the same text. 0 = all."""
    teacher_forced_metrics: tuple[TeacherForcedMetric, ...] = option((), FieldRole.RUNNING)
    """Further metrics of validations, of the tokens that are most probable after the reference's
    preceding tokens. seq2seq_acc: share of positions that are right, where batches of 64 sentences
    are padded and padding counts as right, as a mean over sentences (fast.ai); teacher_forced_bleu:
    BLEU over tokens."""
    watch: tuple[str, ...] = option((), FieldRole.RUNNING)
    """Sentences in the source language whose translations are printed after each validation, beside
    those of some validation sentences."""
    checkpoint_every: int = option(1000, FieldRole.RUNNING, lowest=1)
    """Steps between checkpoints."""
    keep_last: int = option(2, FieldRole.RUNNING, lowest=1)
    """Number of most recent checkpoints to keep."""
    keep_best: int = option(1, FieldRole.RUNNING, lowest=0)
    """Number of best checkpoints to keep, ranked by best_metric."""
    best_metric: ValidationMetric = option("loss", FieldRole.SELECTION)
    """Validation metric that ranks checkpoints."""
    early_stopping_patience: int = option(0, FieldRole.RUNNING, lowest=0)
    """Stop after this many consecutive validations without improvement; 0 = never."""
    early_stopping_metric: ValidationMetric = option("loss", FieldRole.SELECTION)
    """Validation metric that must improve."""
    early_stopping_min_delta: float = option(0.0, FieldRole.SELECTION, lowest=0)
    """Smallest change of the metric that counts as an improvement, exclusive."""
    z_loss: float = option(0.0, FieldRole.TRAINING, lowest=0, limit=1e3)
    """Weight of the squared logarithm of the partition function, which keeps logits small (Shazeer
    et al. 2018); 0 = off, 1e-4 is usual."""
    ema_decay: float = option(0.0, FieldRole.TRAINING, lowest=0, below=1)
    """d: validate and translate with an exponential moving average of the parameters, average = d
    * average + (1 - d) * parameters after each step; 0 = with the parameters themselves."""
    r_drop: float = option(0.0, FieldRole.TRAINING, lowest=0, limit=1e6)
    """alpha of R-Drop (Liang et al. 2021): weight of the divergence between two forward passes of
    each batch with different dropout; 0 = off, 5 is usual for translation."""
    teacher: str = option("", FieldRole.TRAINING)
    """Word-level distillation: the run folder of a model with the same vocabulary, whose
    predictions are learned as well; empty = none."""
    distillation_weight: float = option(0.5, FieldRole.TRAINING, above=0, highest=1)
    """Weight of the divergence from the teacher's predictions; the cross-entropy has the rest."""
    distillation_temperature: float = option(1.0, FieldRole.TRAINING, above=0, limit=1e3)
    """Temperature of the predictions that distillation compares; 1 = as they are."""
    guided_alignment_weight: float = option(0.0, FieldRole.TRAINING, lowest=0, limit=1e6)
    """Weight of the alignment loss (Chen et al. 2016), by which cross-attention learns the links of
    data.alignments; 0 = off."""
    guided_alignment_layer: int = option(
        -1, FieldRole.TRAINING, lowest=-MAX_LAYERS, limit=MAX_LAYERS
    )
    """Decoder layer whose attention learns the links, from 0; negative counts from the last."""
    max_skipped_steps: int = option(10, FieldRole.RUNNING, lowest=1)
    """Stop at the last checkpoint after this many consecutive steps whose loss, gradient or update
    is not finite. Such steps change no parameter."""
    init_from: str = option("", FieldRole.START)
    """Initial parameters: a run folder (its best checkpoint, and its vocabulary), or a .safetensors
    file written by `flaxformer-mt convert --to flaxformer_mt`."""
    init_optimizer: bool = option(False, FieldRole.START)
    """Take the moments of the optimizer, too, from the checkpoint of the run that init_from names,
    where their shapes agree. The steps of the learning rate are counted anew."""
    freeze: tuple[str, ...] = option((), FieldRole.TRAINING)
    """Regular expressions; parameters whose path matches any of them are not trained: "encoder/",
    "embedding"."""
    show_translations: int = option(5, FieldRole.RUNNING, lowest=0)
    """Number of test translations to print at the end."""

    _prefix = "train."
    _relations = relations.TRAIN

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile_steps`; empty if there are none."""
        steps = re.fullmatch(r"([1-9]\d{0,9}):([1-9]\d{0,9})", self.profile_steps, re.ASCII)
        return range(int(steps[1]), int(steps[2]) + 1) if steps else range(0)


@dataclasses.dataclass(frozen=True, repr=False)
class ParallelConfig(Checked):
    """How batches and parameters are distributed over devices."""

    strategy: Literal["mesh", "pmap"] = option("mesh", FieldRole.RUNNING)
    """mesh: jit over a device mesh; pmap: one program per device, plain data parallelism."""
    num_devices: int = option(0, FieldRole.RUNNING, lowest=0, limit=10**6)
    """Number of devices of all processes together; 0 = all. They form a mesh of data * fsdp *
    tensor devices; what fsdp and tensor do not use is the data axis, which shards rows."""
    fsdp: int = option(1, FieldRole.RUNNING, lowest=1, limit=10**6)
    """Size of the mesh axis that shards rows, parameters and optimizer state; parameters are
    gathered where they are used (fully sharded data parallelism, ZeRO)."""
    tensor: int = option(1, FieldRole.RUNNING, lowest=1, limit=10**6)
    """Size of the mesh axis that shards matrices and the computation with them (tensor
    parallelism, Megatron)."""
    axes: tuple[str, ...] = option((), FieldRole.RUNNING)
    """Further mesh axes of your own, such as experts=4. Nothing is sharded over them, unless
    sharding_rules or activations say so."""
    sharding_rules: tuple[tuple[str, str], ...] = option((), FieldRole.RUNNING)
    """Sharding rules that take precedence over the built-in ones: pairs of a regular expression for
    parameter paths and the comma-separated mesh axes of the last dimensions ("fsdp,tensor", "-"
    for not sharded)."""
    activations: tuple[tuple[str, str], ...] = option((), FieldRole.RUNNING)
    """How the values between the layers are sharded: pairs of a name that the model gives an axis
    ("length") and a mesh axis ("sequence")."""

    _prefix = "parallel."
    _relations = relations.PARALLEL

    @property
    def own_axes(self) -> dict[str, int]:
        """The sizes of `axes` by name."""
        return {name: int(size) for name, _, size in (each.partition("=") for each in self.axes)}

    @property
    def devices_per_row(self) -> int:
        """The number of devices that compute each row of a batch together."""
        return math.prod(self.own_axes.values()) * self.tensor
