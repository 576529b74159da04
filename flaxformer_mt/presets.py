"""The published Transformers, by name, as configurations.

A preset holds what its source fixes: the mathematics, initial values, dropout sites and default
sizes. Vocabulary sizes and special tokens are the run's own, because every source takes them as
arguments; only a start of decoding that is part of the mathematics is set.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.errors import UserError


def preset(family: str, **overrides: Any) -> TransformerConfig:
    """The configuration of a published Transformer.

    Args:
      family: a key of `FAMILIES`.
      **overrides: fields of `TransformerConfig` that shall have other values. Fields that the
        source derives from these (a dropout site that follows the rate, say) follow.

    Raises:
      UserError: the family or a field is unknown, or the values do not go together.
    """
    if family not in FAMILIES:
        raise UserError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    fields = [field.name for field in dataclasses.fields(TransformerConfig)]
    unknown = sorted(set(overrides) - set(fields))
    if unknown:
        raise UserError(f"unknown model option {unknown[0]!r}: choose among {', '.join(fields)}")
    return FAMILIES[family](**overrides)


def jadore801120(**overrides: Any) -> TransformerConfig:
    """Post-norm with one more norm after the embeddings, as in the paper's text.

    The published `scale_emb_or_prj` is `scale_embeddings` ("emb"), `scale_logits` ("prj", the
    default) or neither ("none"). As in the published code it has no effect, and both are False,
    where the output is not tied.

    Source: https://github.com/jadore801120/attention-is-all-you-need-pytorch
    """
    ties_output = overrides.get("tie_embeddings", "all") in ("all", "target_output")
    scale_embeddings = ties_output and overrides.get("scale_embeddings", False)
    scale_logits = ties_output and overrides.get("scale_logits", not scale_embeddings)
    values: dict[str, Any] = {
        "head_dim": 64,
        "value_dim": 64,
        "attention_dropout_rate": 0.1,  # whatever the rate
        "embedding_norm": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "embedding_init": "xavier_uniform",
        "bias_init": "torch_default",
    }
    scales = {"scale_embeddings": scale_embeddings, "scale_logits": scale_logits}
    return TransformerConfig(**values | overrides | scales)


def notebook(**overrides: Any) -> TransformerConfig:
    """Post-norm layers only: no embeddings, no positions, no output projection.

    To train from scratch, use it with positions: `preset("notebook",
    position_kind="sinusoidal")`. A head's two linear maps are one here, see
    `interop/notebook.py`.

    Source: a study notebook on attention ("ScaledDotProductAttention, It's fundermental for
    multi-head attention").
    """
    values: dict[str, Any] = {
        "norm_epsilon": 1e-5,
        "position_kind": "none",
        "scale_embeddings": False,
        "tie_embeddings": "none",
        "kernel_init": "torch_default",
        "bias_init": "torch_default",
    }
    return TransformerConfig(**values | overrides)


def annotated(**overrides: Any) -> TransformerConfig:
    """Pre-norm with the unbiased standard deviation, nothing tied.

    These are the values of a set of study notes on it ("Understanding the Transformer"), whose
    sinusoids have base 1000. harvardnlp's own has `position_base=10000.0` and
    `kernel_init="xavier_uniform", embedding_init="xavier_uniform"`.

    Source: The Annotated Transformer, https://nlp.seas.harvard.edu/annotated-transformer/
    """
    values: dict[str, Any] = {
        "activation_dropout_rate": overrides.get("dropout_rate", 0.1),
        "attention_dropout_rate": 0.1,  # whatever the rate
        "norm_position": "pre",
        "norm_kind": "unbiased_std",
        "final_norm": True,
        "output_bias": True,
        "position_base": 1000.0,
        "tie_embeddings": "none",
        "kernel_init": "xavier_normal",
        "embedding_init": "xavier_normal",
        "bias_init": "torch_default",
    }
    return TransformerConfig(**values | overrides)


def questions(**overrides: Any) -> TransformerConfig:
    """The Annotated Transformer with heads that do not divide the width: D 300, H*K 384.

    Source: a French-English question translator ("Transformers?, why not RNNS ?").
    """
    values: dict[str, Any] = {
        "d_model": 300,
        "num_heads": 6,
        "head_dim": 64,
        "value_dim": 64,
        "attention_dropout_rate": overrides.get("dropout_rate", 0.1),
        "position_base": 10000.0,
        "kernel_init": "xavier_uniform",
        "embedding_init": "xavier_uniform",
    }
    return annotated(**values | overrides)


def tunz(**overrides: Any) -> TransformerConfig:
    """Tensor2tensor's arrangement: pre-norm, sines then cosines, decoding starts from zeros.

    Source: https://github.com/tunz/transformer-pytorch
    """
    rate = overrides.get("dropout_rate", 0.1)
    values: dict[str, Any] = {
        # A width that the heads do not divide is rounded down.
        "head_dim": overrides.get("d_model", 512) // overrides.get("num_heads", 8),
        "attention_dropout_rate": rate,
        "activation_dropout_rate": rate,
        "norm_position": "pre",
        "final_norm": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
        "zero_pad_embeddings": True,
        "mask_target_padding": False,
        "bos_id": -1,
    }
    return TransformerConfig(**values | overrides)


def torch(**overrides: Any) -> TransformerConfig:
    """`torch.nn.Transformer`, with the embeddings and output of PyTorch's translation tutorial.

    Post-norm, but with the final norms that usually go with pre-norm. PyTorch starts attention
    biases at zero and the others at random; here all start at random.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html and
    https://docs.pytorch.org/tutorials/beginner/translation_transformer.html
    """
    rate = overrides.get("dropout_rate", 0.1)
    values: dict[str, Any] = {
        "attention_dropout_rate": rate,
        "activation_dropout_rate": rate,
        "norm_epsilon": 1e-5,
        "final_norm": True,
        "output_bias": True,
        "tie_embeddings": "none",
        "embedding_init": "xavier_uniform",
        "bias_init": "torch_default",
    }
    return TransformerConfig(**values | overrides)


FAMILIES: dict[str, Callable[..., TransformerConfig]] = {
    "jadore801120": jadore801120,
    "notebook": notebook,
    "questions": questions,
    "annotated": annotated,
    "tunz": tunz,
    "torch": torch,
}
"""Every family's name, and the function that makes its configuration."""
