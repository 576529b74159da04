"""Checks of a configuration before a run starts."""

from pathlib import Path

import jax

from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    TransformerConfig,
    with_vocabulary_sizes,
)
from flaxformer_mt.data.corpora.corpus import has_splits
from flaxformer_mt.data.stream.batches import packed_shape
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.attention import ATTENTION
from flaxformer_mt.model.functional import init
from flaxformer_mt.model.layers import FEED_FORWARD
from flaxformer_mt.runs.folder import holds_run
from flaxformer_mt.training.devices import make_devices, seed_key
from flaxformer_mt.training.objective import CROSS_ENTROPY
from flaxformer_mt.training.optimizer import make_schedule
from flaxformer_mt.training.parameters import split


def check_before_start(
    config: ExperimentConfig, workdir: Path, accept_changes: bool = False
) -> None:
    """Raises errors that can be found before anything is read or written."""
    for name in ("dtype", "param_dtype"):
        if (
            getattr(config.model, name) == "float64"
            and jax.dtypes.canonicalize_dtype("float64") != "float64"
        ):
            raise UserError(
                f"model.{name}=float64: JAX computes in float32 unless the environment has "
                "JAX_ENABLE_X64=1"
            )
    ATTENTION.of(config.model.attention_kind)
    FEED_FORWARD.of(config.model.feed_forward_kind)
    make_devices(config)
    make_schedule(config.optimizer, config.model.d_model, config.train.num_steps)
    packed_shape(config)
    holds_run(workdir, config, accept_changes)
    if config.train.freeze:
        # Raises what is wrong with it. The sizes of the vocabularies are not known yet.
        model = with_vocabulary_sizes(config.model, 1, 1)
        split(jax.eval_shape(lambda: init(model, seed_key(0))), config.train.freeze)


def require_effects(config: ExperimentConfig) -> None:
    """Raises `UserError` for an option of a new run that others make ineffective."""
    data, model = config.data, config.model
    if data.train_split != DataConfig.train_split and not (data.train_corpora or has_splits(data)):
        raise UserError(
            f"data.train_split={data.train_split} has no effect: data.path={data.path} has no "
            "splits"
        )
    if data.subword_sampling and not model.has_inputs:
        raise UserError(
            f"data.subword_sampling={data.subword_sampling} has no effect: a language model has no "
            "sources to segment"
        )
    if not model.has_inputs:
        for name, is_given in (
            ("data.max_length_ratio", data.max_length_ratio),
            ("data.drop_identical", data.drop_identical),
            ("train.watch", config.train.watch),
        ):
            if is_given:
                raise UserError(f"{name} has no effect: a language model has no sources")
    is_guided = config.train.guided_alignment_weight or config.train.objective != CROSS_ENTROPY
    if data.alignments and not is_guided:
        raise UserError(
            f"data.alignments={data.alignments} has no effect: set train.guided_alignment_weight, "
            "or give an objective that reads Batch.alignment"
        )
    optimizer = config.optimizer
    if optimizer.total_steps and not optimizer.schedule_has_end and not optimizer.warmup:
        raise UserError(
            f"optimizer.total_steps={optimizer.total_steps} has no effect with "
            f"optimizer.schedule={optimizer.schedule}: it is the length of schedules that have an "
            "end, and what optimizer.warmup is a share of"
        )
    rates = (
        model.dropout_rate, model.embedding_dropout, model.attention_dropout_rate,
        model.activation_dropout_rate,
    )  # fmt: skip
    if config.train.r_drop and not any(rates):
        raise UserError(
            f"train.r_drop={config.train.r_drop} has no effect without dropout: set "
            "model.dropout_rate, or train.r_drop=0"
        )


def require_shared_vocabulary(model: TransformerConfig, tokenizers: Tokenizers) -> None:
    """Checks that an embedding table of both sides is for a vocabulary of both sides."""
    source, target = tokenizers.source, tokenizers.target
    # In published vocabularies, the same ids may be read by two tokenizers.
    is_own = isinstance(source, SentencePieceTokenizer)
    if is_own and source.fingerprint != target.fingerprint and model.shares_source_and_target:
        raise UserError(
            f"model.tie_embeddings={model.tie_embeddings} gives both sides one table, but each has "
            "a vocabulary of its own: set model.tie_embeddings=target_output or none, or use one "
            "vocabulary (data.joint_vocabulary=True, or one file as data.tokenizer_path)"
        )
