"""The tokens that both sides are given."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.weight_maps.validation import ids_outside


class Tokens(NamedTuple):
    """A padded batch with one sentence pair per row; int32."""

    source: np.ndarray
    """[B, S]"""
    target_input: np.ndarray
    """[B, T]: the targets shifted right, after the start token."""
    target_output: np.ndarray
    """[B, T]: the targets."""


class Padding(NamedTuple):
    """The masks of real tokens; values at padding are not compared."""

    source: np.ndarray
    """bool [B, S], True = real token."""
    target: np.ndarray
    """bool [B, T], True = real token."""


def padding(tokens: Tokens, pad_id: int) -> Padding:
    """Returns the masks of real tokens; the target's is that of its outputs."""
    # Some models start decoding with `pad_id`, so that the inputs are ambiguous.
    found = Padding(tokens.source != pad_id, tokens.target_output != pad_id)
    if not found.target.any():
        raise UserError("the batch has no target token that is not padding")
    return found


def check_special_tokens(config: TransformerConfig) -> None:
    """Checks that the special tokens are in the vocabularies and do not collide."""
    # Start and end may be one token, as in fairseq. Start and padding may be one token, as in
    # Marian, unless padding is masked in the decoder's self-attention, which would hide the start.
    if not config.target_vocab_size:  # Bare layers take vectors.
        return
    for name, token, size in ids_outside(config):
        raise UserError(
            f"{name}={token} is outside of a vocabulary of {size} tokens: give another {name}"
        )
    distinct = ("bos_id", "eos_id") if config.mask_target_padding else ("eos_id",)
    for name in distinct:
        if config.pad_id == getattr(config, name) >= 0:
            raise UserError(
                f"pad_id={config.pad_id} collides with {name}={config.pad_id}: give a pad_id and a "
                f"{name} that differ"
            )


def as_tokens(batch: Any, config: TransformerConfig) -> Tokens:
    """Converts a batch in any of the usual forms, see `compare`; arrays of NumPy, JAX or PyTorch.

    Missing outputs are the inputs without the first token, followed by the end token; a row of
    padding alone has none. Raises UserError for another form and for packed rows.
    """
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    if isinstance(batch, tuple | list):
        arrays = list(batch)
    elif isinstance(batch, Mapping):
        arrays = [batch[name] for name in names if name in batch]
    else:
        arrays = [getattr(batch, name) for name in names if hasattr(batch, name)]
    if len(arrays) not in (2, 3):
        raise UserError(
            f"a batch must have {', '.join(names)}, or be a tuple of these in this order"
        )
    _refuse_packed(batch)
    try:
        given = [np.asarray(array) for array in arrays]
        arrays = [array.astype(np.int32) for array in given]
    except (TypeError, ValueError) as error:
        raise UserError(
            "the tokens of a batch must be arrays of integers with rows of one length: fill up "
            f"shorter rows with pad_id={config.pad_id}"
        ) from error
    if not all(map(np.array_equal, arrays, given)):
        raise UserError("the tokens of a batch must be integers")
    rows = {array.shape[:1] for array in arrays}
    if any(array.ndim != 2 for array in arrays) or len(rows) != 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise UserError(f"the tokens of a batch must be [B, S], [B, T] and [B, T], not {shapes}")
    if len(arrays) == 2:
        arrays.append(_without_start(arrays[0], arrays[1], config))
    tokens = Tokens(*arrays)
    _require_vocabulary(tokens, config)
    return tokens


def _require_vocabulary(tokens: Tokens, config: TransformerConfig) -> None:
    # tunz starts from a zero vector instead of a token: -1.
    lowest = min(0, config.bos_id, config.pad_id)
    for name, array in tokens._asdict().items():
        # Bare layers have no vocabularies.
        size = config.source_vocab_size if name == "source" else config.target_vocab_size
        if size and array.size and not (lowest <= array.min() and array.max() < size):
            raise UserError(
                f"{name} has tokens from {array.min()} to {array.max()}, but the vocabulary "
                f"has {size}"
            )


def _refuse_packed(batch: Any) -> None:
    name = "decoder_segment_ids"
    segments = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
    if segments is not None and np.max(np.asarray(segments)) > 1:
        raise UserError(
            "published models do not support packed rows: use one sentence pair per row"
        )


def _without_start(
    source: np.ndarray, target_input: np.ndarray, config: TransformerConfig
) -> np.ndarray:
    has_sentence = (target_input != config.pad_id).any(axis=1)
    if config.bos_id == config.pad_id:
        # The inputs of an empty target are padding, too; its source is not.
        has_sentence |= (source != config.pad_id).any(axis=1)
    outputs = np.roll(target_input, -1, axis=1)
    real = np.roll(target_input != config.pad_id, -1, axis=1)
    real[:, -1] = False
    # The end token is the output at the last input token of each row.
    outputs = np.where(real, outputs, config.pad_id)
    (rows,) = np.nonzero(has_sentence)
    outputs[rows, real[rows].sum(axis=1)] = config.eos_id
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
    """Returns B = `rows` random sentences; all but the first are padded, targets on the right.

    Without a padding token (`pad_id=-1`), all have the full length.
    """
    random = np.random.default_rng(seed)
    source_lengths = _lengths(random, source_length, rows, config.pad_id >= 0)
    target_lengths = _lengths(random, target_length, rows, config.pad_id >= 0)
    source = _sentences(random, config, config.source_vocab_size, source_lengths)
    if source_padding == "left":
        source = np.stack(
            [np.roll(row, source_length - n) for row, n in zip(source, source_lengths, strict=True)]
        )
    output = _sentences(random, config, config.target_vocab_size, target_lengths)
    start = np.full((rows, 1), config.bos_id, np.int32)
    target_input = np.concatenate([start, output[:, :-1]], axis=1)
    # The end token is never an input.
    target_input = np.where(output == config.pad_id, config.pad_id, target_input)
    return Tokens(source, target_input, output)


def _lengths(random: np.random.Generator, longest: int, rows: int, is_padded: bool) -> np.ndarray:
    shortest = max(1, min(2, longest - 1)) if is_padded else longest
    return np.append(longest, random.integers(shortest, max(longest, shortest + 1), rows - 1))


def _sentences(
    random: np.random.Generator, config: TransformerConfig, vocabulary: int, lengths: np.ndarray
) -> np.ndarray:
    special = {config.pad_id, config.bos_id, config.eos_id}
    size = vocabulary or config.d_model
    words = [token for token in range(size) if token not in special]
    if not words:
        raise UserError(f"a vocabulary of {size} tokens has only special ones: give a larger one")
    tokens = random.choice(words, size=(len(lengths), lengths.max()))
    columns = np.arange(lengths.max())
    tokens = np.where(columns == lengths[:, None] - 1, config.eos_id, tokens)
    return np.where(columns < lengths[:, None], tokens, config.pad_id).astype(np.int32)


def real_rows(site: str, real: Padding) -> np.ndarray:
    """Returns the mask of real tokens that applies to a site, bool [B, S] or [B, T]."""
    of_source = site.startswith(("source/", "encoder/"))
    return real.source if of_source or _READS_THE_ENCODER.search(site) else real.target


_READS_THE_ENCODER = re.compile("cross_attention/(key|value)$")


def select_rows(site: str, value: np.ndarray, real: Padding) -> np.ndarray:
    """Selects the rows of real tokens [N, ...] of a value [B, T, ...] or [B, H, T, S]."""
    by_row = value.swapaxes(1, 2) if value.ndim == 4 else value
    return by_row[real_rows(site, real)]
