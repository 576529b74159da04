"""The objective of training: label-smoothed cross-entropy, and what is added to it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.stream.batches import Batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.functional import apply_to_batch, as_module
from flaxformer_mt.model.stack import LOSSES
from flaxformer_mt.model.transformer import OutputFactors
from flaxformer_mt.objectives.chunked import CrossEntropyOptions, Term, chunked_cross_entropy
from flaxformer_mt.objectives.flops import training_flops, work_of_batch
from flaxformer_mt.objectives.losses import Convention

Params: TypeAlias = dict[str, Any]
Metrics: TypeAlias = dict[str, tuple[Array, Array]]
"""By name, a sum and the weight to divide it by; both are additive over batches and devices."""


@flax.struct.dataclass
class Sums:
    """What an objective gives for some rows: sums, which are additive over rows."""

    loss: Array
    """What is minimized, summed over the rows: a scalar, differentiable."""
    weight: Array
    """What `loss` is divided by: the weights of target tokens, or the number of sentences."""
    tokens: Array
    """The number of target tokens, whatever their weights, for reports of speed."""
    metrics: Metrics = flax.struct.field(default_factory=dict)  # further sums to report


class Objective(Protocol):
    """What training minimizes, as `fmt.train(objective=)` and `train_step` take it.

    `fmt.train` binds its first argument, the configuration of the model.
    """

    def __call__(self, params: Params, batch: Batch, key: Array, frozen: Any) -> Sums:
        """Computes the sums of some rows.

        Args:
          params: those that are trained.
          batch: the rows.
          key: for dropout and sampling; another one in each step and for each part of a batch.
          frozen: a tree that is not trained, such as the parameters of a teacher, or None.
        """


def cross_entropy(
    model: TransformerConfig | nn.Module,
    params: Params,
    batch: Batch,
    key: Array | None = None,
    *,
    smoothing: float = 0.0,
    convention: Convention = "uniform",
    term: Term | None = None,
    z_loss: float = 0.0,
    teacher: tuple[TransformerConfig | nn.Module, Params] | None = None,
) -> Sums:
    r"""Computes the label-smoothed cross-entropy of a batch; its logits are never in memory.

        def loss(params):
            sums = fmt.cross_entropy(config, params, batch, key, smoothing=0.1)
            return sums.loss / sums.weight, sums

        gradient, sums = jax.grad(loss, has_aux=True)(params)

    Args:
      model: the configuration of the model, or a module that is called like `Transformer`.
      params: its parameters.
      batch: B rows, packed or not.
      key: of dropout; None = no dropout.
      smoothing: the probability moved from the target to other tokens, in [0, 1).
      convention: which ones, and what is reported: the row of the table of `token_losses`.
      term: added to the cross-entropy, see `RDrop` and `Distillation`; it sets the factors of both.
      z_loss: the factor of :math:`\log^2 \sum_k e^{z_k}`, which keeps logits small (Shazeer et al.
        2018; PaLM: 1e-4).
      teacher: another model and its parameters, if the term reads its predictions: it is computed
        without dropout, and has no gradient.

    Losses that layers add (`FeedForward.add_loss`) are part of the sum and are reported.

    Returns:
      The sums over the target tokens, with the metrics "loss" (the cross-entropy alone) and
      "accuracy", the means of both passes if the term has two; that of the term by its name;
      "z_loss", without its factor; and "flops_per_target_token", see `training_flops`. All sums are
      differentiable with respect to the parameters and to `decoder_loss_weights`; a gradient of a
      metric costs a second pass over the vocabulary.

    Raises:
      UserError: the parameters are those of another model, or a module does not return the factors
        of its logits (`OutputFactors`) when it is called with project=False.
    """
    module = as_module(model)
    passes = term.passes if term else 1
    # A row and its copy are neighbors, and therefore on the same device.
    rows = jax.tree.map(functools.partial(jnp.repeat, repeats=passes, axis=0), batch)
    factors, collections = apply_to_batch(
        module, params, rows, key, project=False, mutable=[LOSSES]
    )
    pad_id = module.config.pad_id
    options = CrossEntropyOptions(smoothing, convention, pad_id, term, z_loss)
    of_teacher = None
    if teacher is not None:
        other, frozen = teacher
        of_teacher = apply_to_batch(other, frozen, rows, None, project=False)
    sums = sums_of_factors(module.config, batch, factors, options, rows, of_teacher)
    return with_losses_of_layers(sums, collections)


def with_losses_of_layers(sums: Sums, collections: Mapping[str, Any]) -> Sums:
    """Adds the losses of layers (`FeedForward.add_loss`), summed over layers, to the objective.

    `collections` are those that `apply` returns with `mutable=[LOSSES]`.
    """
    by_name: dict[str, Array] = {}
    for path, value in flatten_dict(collections.get(LOSSES, {})).items():
        by_name[path[-1]] = by_name.get(path[-1], 0) + jnp.sum(value)
    metrics = {name: (value, sums.tokens) for name, value in by_name.items()}
    loss = functools.reduce(jnp.add, by_name.values(), sums.loss)
    return dataclasses.replace(sums, loss=loss, metrics=sums.metrics | metrics)


def sums_of_factors(
    config: TransformerConfig,
    batch: Batch,
    factors: OutputFactors,
    options: CrossEntropyOptions,
    rows: Batch,
    teacher: OutputFactors | None = None,
) -> Sums:
    """Computes the sums of `cross_entropy` from the outputs of the forward pass.

    `rows` is the batch with each row as often as the term needs it; `factors` and `teacher` are
    the outputs of the model and the teacher for them.
    """
    for each in (factors, teacher):
        if not isinstance(each, OutputFactors | None):
            raise UserError(
                f"with project=False the model returned {type(each).__name__} instead of the "
                "factors of its logits: return `OutputFactors`, as `Transformer` does"
            )
    term = options.term
    passes = term.passes if term else 1
    sums = chunked_cross_entropy(
        factors, rows.decoder_target_tokens, rows.decoder_loss_weights, options, teacher
    )
    weight, work = sums.weights / passes, work_of_batch(batch)
    metrics: Metrics = {
        "loss": (sums.loss / passes, weight),
        "accuracy": (sums.correct / passes, weight),
        "flops_per_target_token": (passes * training_flops(config, work), work.targets),
    }
    if term is not None and sums.term is not None:
        metrics[term.name] = (sums.term, weight)
    if sums.z_loss is not None:
        metrics["z_loss"] = (sums.z_loss / passes, weight)
    return Sums(sums.objective, weight, work.targets, metrics)
