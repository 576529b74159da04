"""MetricX: an mT5 whose first decoding step predicts the error of a translation, from 0 to 25.

Source: google-research/metricx, `metricx24/models.py` and `metricx24/predict.py`; Juraska et al.
2024.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families import t5
from flaxformer_mt.interop.formats import huggingface
from flaxformer_mt.interop.weight_maps import checkpoints
from flaxformer_mt.interop.weight_maps.mapping import model_params
from flaxformer_mt.judges.judge import Judge, Side, Template
from flaxformer_mt.model.numerics import at_least_float32
from flaxformer_mt.model.transformer import OutputFactors, Transformer
from flaxformer_mt.trained_model import parameters_sha256

SCORE_TOKEN = 250089
"""The token `<extra_id_10>` of mT5, whose logit is the score."""
WORST = 25.0
_LONGEST = 1535
"""1,536 tokens with the end token, which is removed after the row is cut."""
_NAMES = ("source:", "candidate:", "reference:")


def predictions(
    config: TransformerConfig, params: Any, rows: Int[Array, "B S"]
) -> Float[Array, "B"]:
    """Computes the errors of translations from whole input rows, padded by `config.pad_id`."""
    start = jnp.zeros((len(rows), 1), jnp.int32)
    factors = Transformer(config).apply({"params": params}, rows, start, project=False)
    assert isinstance(factors, OutputFactors)
    vectors = factors.vectors[:, 0].astype(at_least_float32(factors.vectors.dtype))
    weights = factors.table[SCORE_TOKEN].astype(vectors.dtype)
    return jnp.clip(factors.scale * (vectors @ weights), 0, WORST)


def _head(params: Any, scores: Array) -> Array:
    return scores


def read(folder: Path, settings: Mapping[str, Any], dtype: str) -> Judge:
    """Reads a folder of Hugging Face that also has the vocabulary of mT5.

    `settings` are its `config.json`. Errors are those of `metric`.
    """
    tensors, _ = huggingface.read_tensors(folder, t5.FAMILY.ignores)
    with checkpoints.error_context(folder, "t5"):
        checkpoint = checkpoints.unwrapped(
            t5.FAMILY, PublishedCheckpoint(tensors, {**settings, "model_type": "mt5"})
        )
        # MetricX scales where the output is tied, and mT5 never does.
        scales = bool(settings.get("tie_word_embeddings", False))
        fields = {"dtype": dtype, "scale_logits": scales}
        config, params = checkpoints.from_checkpoint(t5.FAMILY, checkpoint, fields)
    if config.target_vocab_size <= SCORE_TOKEN:
        raise UserError(
            f"{folder} has {config.target_vocab_size} tokens: MetricX reads its score from token "
            f"{SCORE_TOKEN} of mT5's vocabulary"
        )
    tokenizer = Tokenizers.load(folder).source
    without, whole = _template(tokenizer, 2), _template(tokenizer, 3)
    params = model_params(params)
    return Judge(
        name="metricx",
        config=config,
        params=params,
        tokenizer=tokenizer,
        forms={False: (without,), True: (whole,)},
        features=predictions,
        head=_head,
        longest_text=None,
        longest_row=_LONGEST,
        lower_is_better=True,
        digest=parameters_sha256(params),
    )


def _template(tokenizer: Tokenizer, number: int) -> Template:
    # Pieces do not cross spaces, so the tokens of a row are those of its parts.
    names = tokenizer.encode_parts(_NAMES[:number])
    return tuple(
        part for name, side in zip(names, Side, strict=False) for part in (tuple(name), side)
    )
