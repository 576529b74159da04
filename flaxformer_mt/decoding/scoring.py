"""How probable given translations are."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from flaxformer_mt.config import ExperimentConfig, TransformerConfig, with_vocabulary_sizes
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.decoding.buckets import fill_rows, plan_buckets
from flaxformer_mt.errors import UserError
from flaxformer_mt.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class PairScore:
    """What the model thinks of one sentence pair."""

    tokens: tuple[int, ...]
    """Target tokens, the end token included."""
    token_log_probabilities: tuple[float, ...]
    """Of each token, given the source and the tokens before it; natural logarithm."""

    @property
    def log_probability(self) -> float:
        """Of the target sentence, its end included, given the source."""
        return math.fsum(self.token_log_probabilities)


def score_pairs(
    config: ExperimentConfig,
    params: Any,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[PairScore]:
    """Scores each target as a translation of its source.

    Empty sentences are scored like all others: they consist of the end token.

    Args:
      config: of the run; `model` and `decode.batch_tokens` are used.
      params: the model's parameters.
      tokenizers: of the run.
      sources: one sentence each.
      targets: as many sentences.

    Returns:
      One score a pair, in the order given.

    Raises:
      UserError: the numbers of sentences differ, or one is longer than a learned position table.
    """
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} source sentences, but {len(targets)} target sentences")
    model = with_vocabulary_sizes(
        config.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size
    )
    source_rows = [[*tokens, model.eos_id] for tokens in tokenizers.source.encode(sources)]
    target_rows = [[*tokens, model.eos_id] for tokens in tokenizers.target.encode(targets)]
    input_rows = [[model.bos_id, *tokens[:-1]] for tokens in target_rows]
    # A pair is as long as the longer of its sides, so that shapes stay few.
    lengths = [max(map(len, pair)) for pair in zip(source_rows, target_rows, strict=True)]
    scores: dict[int, PairScore] = {}
    for bucket in plan_buckets(lengths, config.decode.batch_tokens, model):
        log_probabilities = target_log_probabilities(
            params,
            fill_rows(source_rows, bucket, model.pad_id),
            fill_rows(input_rows, bucket, model.pad_id),
            fill_rows(target_rows, bucket, model.pad_id),
            model=model,
        ).tolist()
        for index, row in zip(bucket.indices, log_probabilities, strict=False):
            tokens = tuple(target_rows[index])
            scores[index] = PairScore(tokens, tuple(row[: len(tokens)]))
    return [scores[index] for index in range(len(sources))]


def perplexity(scores: Sequence[PairScore]) -> float:
    """Of the targets: exp(-mean log-probability of a token), end tokens included."""
    total = math.fsum(score.log_probability for score in scores)
    return math.exp(-total / sum(len(score.tokens) for score in scores))


@functools.partial(jax.jit, static_argnames="model")
def target_log_probabilities(
    params: Any,
    source_tokens: Array,
    input_tokens: Array,
    target_tokens: Array,
    *,
    model: TransformerConfig,
) -> Array:
    """Log-probability of each target token, given the source and the target before it.

    Args:
      params: of `model`.
      source_tokens: int32 [B, S], with end token, padded.
      input_tokens: int32 [B, T], the targets shifted right by the start token.
      target_tokens: int32 [B, T], with end token, padded.
      model: which Transformer.

    Returns:
      float32 (or float64, where the model computes in it) [B, T]; meaningless at padding.
    """
    logits: Any = Transformer(model).apply({"params": params}, source_tokens, input_tokens)
    chosen = jnp.take_along_axis(logits, target_tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
