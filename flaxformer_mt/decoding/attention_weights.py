"""The attention of a sentence pair: the weights of every layer and head, for people to look at."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.decoding.batching.length_buckets import fill_rows, plan_buckets
from flaxformer_mt.decoding.parameters import on_one_device
from flaxformer_mt.decoding.scoring.scorer import certain_first_token, tokenized_targets
from flaxformer_mt.decoding.sentence_decoder import longest_source
from flaxformer_mt.decoding.text_arguments import require_text
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import ZERO_VECTOR, AttentionWeights, Transformer
from flaxformer_mt.writing_systems import stripped

AttentionKind = Literal["encoder", "decoder", "cross"]
"""Self-attention of the encoder, self-attention of the decoder, or cross-attention."""

MAX_WEIGHTS = 20_000_000
"""Limit of the weights of one sentence pair, over all kinds, layers and heads."""


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """The attention of one kind, in L layers of H heads, from T tokens to S tokens."""

    weights: np.ndarray
    """float32 [L, H, T, S]. Each row sums to 1, up to rounding in the model's compute dtype."""

    @functools.cached_property
    def entropies(self) -> np.ndarray:
        """The entropy of each row in bits, float32 [L, H, T]; at most log2(S)."""
        logarithms = np.zeros_like(self.weights)
        np.log2(self.weights, out=logarithms, where=self.weights > 0)
        return np.maximum(-(self.weights * logarithms).sum(axis=-1), 0)

    @functools.cached_property
    def alignment(self) -> np.ndarray:
        """The position that each row attends to most, int [L, H, T]; the first of equal ones."""
        return self.weights.argmax(axis=-1)


@dataclasses.dataclass(frozen=True)
class SentenceAttention:
    """The attention of a model that translates `source` as `target`."""

    source: str
    target: str
    source_tokens: tuple[str, ...]
    """S pieces, with the end token, if the model's sources have one."""
    input_tokens: tuple[str, ...]
    """T pieces: what the decoder reads, the start token and all of `target_tokens` but the last."""
    target_tokens: tuple[str, ...]
    """T pieces: what the decoder predicts, each after the input tokens up to its own position."""
    maps: Mapping[AttentionKind, AttentionMaps]
    """
    "encoder": from source to source tokens [L, H, S, S].
    "decoder": from each position of the target to the input tokens [L, H, T, T]; absent in models
    whose decoder is recurrent.
    "cross": from each position of the target to the source tokens [L, H, T, S].
    """


def sentence_attention(
    translator: Translator, source: str, target: str | None = None
) -> SentenceAttention:
    """Computes the attention of a model, in one full pass over a sentence and its translation.

    The model is the first one of `translator`, whose own translation is the default of `target`.

    Raises:
      UserError: the source is empty, or a sentence is too long.
    """
    source = stripped(require_text(source, "source"))
    if not source:
        raise UserError("the source is empty: give a sentence")
    model, params = translator.models[0]
    tokenizers = translator.tokenizers
    (source_text,) = tokenizers.source.encode([source])
    source_ids = tokenizers.source.with_source_end(source_text)
    if target is None:
        limit = longest_source(translator.decode, [model])
        if len(source_ids) > limit:
            raise UserError(
                f"the source has {len(source_ids)} tokens, and would be split into sentences of "
                f"at most {limit}: give one of them"
            )
        hypothesis = translator.translate_n_best(source, 1, scores=False)[0]
        if not hypothesis.tokens:
            raise UserError("the source has no tokens: give another sentence")
        target, target_ids = hypothesis.text, [*hypothesis.tokens]
        target_tokens = tokenizers.target.pieces(target_ids)
    else:
        target = stripped(require_text(target, "target"))
        first = certain_first_token(tokenizers.target, translator.decode)
        (row,) = tokenized_targets([target], tokenizers.target, first)
        target_ids, target_tokens = row.tokens, row.pieces
    _require_size(model, len(source_ids), len(target_ids))
    return SentenceAttention(
        source=source,
        target=target,
        source_tokens=(
            *tokenizers.source.split([source])[0],
            *tokenizers.source.pieces(source_ids[len(source_text) :]),
        ),
        input_tokens=(_piece(tokenizers.target, model.bos_id), *target_tokens[:-1]),
        target_tokens=tuple(target_tokens),
        maps=_maps(params, model, source_ids, target_ids),
    )


def _piece(tokenizer: Any, token: int) -> str:
    return "0" if token == ZERO_VECTOR else tokenizer.pieces([token])[0]


def _require_size(model: TransformerConfig, num_source: int, num_target: int) -> None:
    encoder = model.num_encoder_layers * num_source**2
    decoder = model.num_decoder_layers * num_target * (num_source + num_target)
    if model.num_heads * (encoder + decoder) > MAX_WEIGHTS:
        raise UserError(
            f"{num_source} source and {num_target} target tokens have more than {MAX_WEIGHTS:,} "
            "attention weights: give a shorter sentence"
        )


def _maps(
    params: Any, model: TransformerConfig, source: Sequence[int], target: Sequence[int]
) -> dict[AttentionKind, AttentionMaps]:
    num_source, num_target = len(source), len(target)
    (bucket,) = plan_buckets([max(num_source, num_target)], 1, model)
    weights = on_one_device(
        _attention_weights(
            params,
            fill_rows([source], bucket, model.pad_id),
            fill_rows([[model.bos_id, *target[:-1]]], bucket, model.pad_id),
            model=model,
        )
    )
    found: dict[AttentionKind, tuple[Array | None, int, int]] = {
        "encoder": (weights.encoder_self, num_source, num_source),
        "decoder": (weights.decoder_self, num_target, num_target),
        "cross": (weights.decoder_cross, num_target, num_source),
    }
    return {
        kind: AttentionMaps(np.asarray(array[:, 0, :, :rows, :columns]).astype(np.float32))
        for kind, (array, rows, columns) in found.items()
        if array is not None
    }


@functools.partial(jax.jit, static_argnames="model")
def _attention_weights(
    params: Any, source: Array, inputs: Array, *, model: TransformerConfig
) -> AttentionWeights:
    result: Any = Transformer(model).apply(
        {"params": params}, source, inputs, return_attention=True
    )
    return result[1]
