"""The sentences that both sides are given."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError


class Tokens(NamedTuple):
    """One sentence pair a row, padded; int32."""

    source: np.ndarray
    """[B, S]"""
    target_input: np.ndarray
    """[B, T]: the targets shifted right, behind whatever starts decoding."""
    target_output: np.ndarray
    """[B, T]: the targets."""


class Padding(NamedTuple):
    """Where tokens are real; what is computed at padding means nothing and is not compared."""

    source: np.ndarray
    """bool [B, S], True = a token of the sentence."""
    target: np.ndarray
    """bool [B, T], the same."""


def padding(tokens: Tokens, pad_id: int) -> Padding:
    """Where `tokens` are real: by their outputs, because some models start decoding with `pad_id`.

    Raises:
      UserError: no target token is real.
    """
    found = Padding(tokens.source != pad_id, tokens.target_output != pad_id)
    if not found.target.any():
        raise UserError("the batch has no target token that is not padding")
    return found


def as_tokens(batch: Any, config: TransformerConfig) -> Tokens:
    """Takes a batch in any of the usual forms.

    Args:
      batch: a mapping or an object with `encoder_input_tokens`, `decoder_input_tokens` and
        `decoder_target_tokens`; or (source, target_input), (source, target_input, target_output).
        Without outputs each row's are its inputs without the first, and the end token. Arrays may
        be of numpy, JAX or PyTorch.
      config: its `pad_id` and `eos_id` are used.

    Raises:
      UserError: the batch has another form, or its shapes do not go together, or it is packed.
    """
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    if isinstance(batch, tuple | list):
        arrays = list(batch)
    elif isinstance(batch, Mapping):
        arrays = [batch[name] for name in names if name in batch]
    else:
        arrays = [getattr(batch, name) for name in names if hasattr(batch, name)]
    if len(arrays) not in (2, 3):
        raise UserError(f"a batch has {', '.join(names)}, or is a tuple of these in this order")
    _refuse_packed(batch)
    arrays = [np.asarray(array).astype(np.int32) for array in arrays]
    if len(arrays) == 2:
        arrays.append(_without_start(arrays[1], config))
    tokens = Tokens(*arrays)
    rows = {array.shape[:1] for array in tokens}
    if any(array.ndim != 2 for array in tokens) or len(rows) != 1:
        shapes = ", ".join(str(array.shape) for array in tokens)
        raise UserError(f"a batch's tokens should be [B, S], [B, T] and [B, T], not {shapes}")
    return tokens


def _refuse_packed(batch: Any) -> None:
    name = "decoder_segment_ids"
    segments = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    if segments is not None and np.max(np.asarray(segments)) > 1:
        raise UserError("published models know no packed rows: give one sentence pair a row")


def _without_start(target_input: np.ndarray, config: TransformerConfig) -> np.ndarray:
    outputs = np.roll(target_input, -1, axis=1)
    real = np.roll(target_input != config.pad_id, -1, axis=1)
    real[:, -1] = False
    # Each row's end token stands where its last token was read.
    outputs = np.where(real, outputs, config.pad_id)
    outputs[np.arange(len(outputs)), real.sum(axis=1)] = config.eos_id
    return outputs


def example(
    config: TransformerConfig,
    *,
    rows: int = 4,
    source_length: int = 7,
    target_length: int = 6,
    source_padding: Literal["left", "right"] = "right",
    seed: int = 0,
) -> Tokens:
    """Sentences of random tokens and lengths; the first row is full, all others are padded.

    Args:
      config: tells vocabularies and special tokens; without vocabularies (layers only) tokens are
        below D.
      rows: B.
      source_length: S.
      target_length: T.
      source_padding: where short sources are filled up; targets always are on the right.
      seed: the same seed gives the same sentences.
    """
    random = np.random.default_rng(seed)
    source_lengths = np.append(source_length, random.integers(2, source_length, rows - 1))
    target_lengths = np.append(target_length, random.integers(2, target_length, rows - 1))
    source = _sentences(random, config, config.source_vocab_size, source_lengths)
    if source_padding == "left":
        source = np.stack(
            [np.roll(row, source_length - n) for row, n in zip(source, source_lengths, strict=True)]
        )
    output = _sentences(random, config, config.target_vocab_size, target_lengths)
    start = np.full((rows, 1), config.bos_id, np.int32)
    target_input = np.concatenate([start, output[:, :-1]], axis=1)
    # The end token is output, never input.
    target_input = np.where(output == config.pad_id, config.pad_id, target_input)
    return Tokens(source, target_input, output)


def _sentences(
    random: np.random.Generator, config: TransformerConfig, vocabulary: int, lengths: np.ndarray
) -> np.ndarray:
    special = {config.pad_id, config.bos_id, config.eos_id}
    words = [token for token in range(vocabulary or config.d_model) if token not in special]
    tokens = random.choice(words, size=(len(lengths), lengths.max()))
    columns = np.arange(lengths.max())
    tokens = np.where(columns == lengths[:, None] - 1, config.eos_id, tokens)
    return np.where(columns < lengths[:, None], tokens, config.pad_id).astype(np.int32)
