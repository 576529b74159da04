"""The weight map of Hugging Face's `XLMRobertaModel`, an encoder alone: XLM-R and InfoXLM.

The norm of the embeddings is applied before their dropout there, and after it here. The layer that
pools the first token for classifiers is not part of the model.

The fields that tensors do not tell are read from the settings, which are those of `config.json`;
without them give `num_heads`.

Source: https://huggingface.co/docs/transformers/model_doc/xlm-roberta; Conneau et al. 2020.
"""

import functools
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.interop.checkpoint_files import PublishedCheckpoint
from flaxformer_mt.interop.families.marian import ACTIVATIONS
from flaxformer_mt.interop.weight_maps import family, rules

_WORDS = "embeddings.word_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_TYPES = "embeddings.token_type_embeddings.weight"
_FIELDS = {
    "num_attention_heads": "num_heads",
    "layer_norm_eps": "norm_epsilon",
    "hidden_dropout_prob": "dropout_rate",
    "attention_probs_dropout_prob": "attention_dropout_rate",
    "pad_token_id": "pad_id",
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_id",
}
_LAYER = "encoder.layer.{layer}."
_LAYERS = rules.Layers(
    encoder=_LAYER,
    decoder=_LAYER,  # There is no decoder: sizes are read from the one stack.
    modules={
        "self_attention": "attention",
        "self_attention_norm": "attention.output.LayerNorm",
        "feed_forward/hidden": "intermediate.dense",
        "feed_forward/output": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    },
    stack_norms={"embedding_norm": "embeddings.LayerNorm"},
    projections=(".self.query", ".self.key", ".self.value", ".output.dense"),
)


def _guess(checkpoint: PublishedCheckpoint) -> dict[str, Any]:
    settings = checkpoint.settings
    fields = family.fields_of_settings(settings, _FIELDS)
    # A sentence begins after the row of padding.
    offset = fields.get("pad_id", 1) + 1
    return {
        **fields,
        **family.activation_of_settings(settings, "hidden_act", ACTIVATIONS),
        "position_offset": offset,
        "max_length": checkpoint.size((_POSITIONS, 0)) - offset,
    }


def _sizes(checkpoint: PublishedCheckpoint, num_heads: int) -> dict[str, Any]:
    vocabulary = {"source_vocab_size": checkpoint.size((_WORDS, 0))}
    return _LAYERS.sizes(checkpoint) | vocabulary | {"num_decoder_layers": 0}


def _rules(config: TransformerConfig, layout: str) -> list[rules.TensorRule]:
    return [
        rules.same("source_embedding/embedding", _WORDS),
        rules.same("source_positions/embedding", _POSITIONS),
        rules.row("encoder/bias", _TYPES),
        *_LAYERS.rules(config),
    ]


FAMILY = family.Family(
    name="xlm_roberta",
    sizes=_sizes,
    also_reads="config.json and a vocabulary",
    guess=_guess,
    rules=_rules,
    open_switches=frozenset({"activation", "norm_epsilon", "position_offset"}),
    order=(
        "embeddings", "word_embeddings", "position_embeddings", "token_type_embeddings", "encoder",
        "layer", "attention", "self", "query", "key", "value", "intermediate", "output", "dense",
        "LayerNorm", "weight", "bias",
    ),
    ignored={
        "position_ids": "are the numbers 0, 1, 2, ...",
        "token_type_ids": "are zeros",
    },
    preset=functools.partial(
        TransformerConfig,
        has_targets=False,
        num_decoder_layers=0,
        tie_embeddings="none",
        norm_epsilon=1e-5,
        embedding_bias=True,
        embedding_norm=True,
        activation="gelu",
        position_kind="learned",
        position_offset=2,
        scale_embeddings=False,
        max_length=512,
        pad_id=1,
        bos_id=0,
        eos_id=2,
    ),
)  # fmt: skip
