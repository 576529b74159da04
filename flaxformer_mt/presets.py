"""Configurations of the published Transformers, by name.

A preset sets what its source fixes: the mathematics, initial values, dropout sites and default
sizes. Vocabulary sizes and special tokens are left to the run, because every source takes them as
arguments; only a start token that is part of the mathematics is set. (If the published vocabularies
always have the same special tokens, these are set when vocabulary sizes are given.)
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flaxformer_mt.config import TransformerConfig
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError

T = TypeVar("T")


def preset(family: str, **overrides: Any) -> TransformerConfig:
    """Returns the configuration of a published Transformer.

    Args:
      family: a key of `FAMILIES` or `FAMILY_ALIASES`.
      **overrides: fields of `TransformerConfig` with other values. Fields that the source derives
        from these, such as the rate of another dropout site, follow.

    Raises:
      UserError: the family or a field is unknown, or the values do not go together.
    """
    published = find_family(family, FAMILIES)
    check_fields(overrides)
    return published(**overrides)


def canonical_family(name: str) -> str:
    """Returns the family that an alias stands for; any other name is returned unchanged."""
    return FAMILY_ALIASES.get(name, name)


def find_family(name: str, families: Mapping[str, T]) -> T:
    """Returns what belongs to the name of a family, or to its alias; UserError if it is unknown."""
    name = canonical_family(name)
    if name not in families:
        raise UserError(f"unknown family {name!r}: choose one of {', '.join(families)}")
    return families[name]


def check_fields(names: Iterable[str]) -> None:
    """Raises UserError unless all names are fields of `TransformerConfig`."""
    fields = [field.name for field in dataclasses.fields(TransformerConfig)]
    unknown = sorted(set(names) - set(fields))
    if unknown:
        hint = suggestion(unknown[0], fields) or f": choose among {', '.join(fields)}"
        raise UserError(f"unknown model option {unknown[0]!r}{hint}")


def jadore801120(**overrides: Any) -> TransformerConfig:
    """Returns a post-norm model with an additional norm after the embeddings.

    The published `scale_emb_or_prj` is `scale_embeddings` ("emb"), `scale_logits` ("prj", the
    default) or neither ("none"). As in the published code it has no effect, and both are False,
    if the output is not tied.

    Source: https://github.com/jadore801120/attention-is-all-you-need-pytorch
    """
    ties_output = overrides.get("tie_embeddings", "all") in ("all", "target_output")
    scale_embeddings = ties_output and overrides.get("scale_embeddings", False)
    scale_logits = ties_output and overrides.get("scale_logits", not scale_embeddings)
    values: dict[str, Any] = {
        "head_dim": 64,
        "value_dim": 64,
        "attention_dropout_rate": 0.1,  # independent of dropout_rate
        "embedding_norm": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "embedding_init": "xavier_uniform",
        "bias_init": "torch_default",
    }
    scales = {"scale_embeddings": scale_embeddings, "scale_logits": scale_logits}
    return TransformerConfig(**values | overrides | scales)


def double_projection(**overrides: Any) -> TransformerConfig:
    """Returns post-norm layers whose heads are projected twice, without positions.

    The source has neither embeddings nor an output projection. To train from scratch, use it with
    positions: `preset("double_projection", position_kind="sinusoidal")`. The two linear maps of
    each head are composed into one, see `interop/families/double_projection.py`.

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
    """Returns a pre-norm model with the unbiased standard deviation and untied embeddings.

    These are the values of a set of study notes ("Understanding the Transformer"), whose sinusoids
    have base 1000. The original by harvardnlp has `position_base=10000.0` and
    `kernel_init="xavier_uniform", embedding_init="xavier_uniform"`.

    Source: The Annotated Transformer, https://nlp.seas.harvard.edu/annotated-transformer/
    """
    values: dict[str, Any] = {
        "activation_dropout_rate": overrides.get("dropout_rate", 0.1),
        "attention_dropout_rate": 0.1,  # independent of dropout_rate
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


def annotated_wide_heads(**overrides: Any) -> TransformerConfig:
    """Returns The Annotated Transformer with heads wider than the model: H*K = 384, D = 300.

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
    """Returns a model like tensor2tensor's: pre-norm, decoding starts from a zero vector.

    Source: https://github.com/tunz/transformer-pytorch
    """
    # The output projection of the published code is always the target embedding.
    check_choice("tunz", overrides, "tie_embeddings", ("all", "target_output"))
    rate = overrides.get("dropout_rate", 0.1)
    values: dict[str, Any] = {
        # A width that is not divisible by the number of heads is rounded down.
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
    """Returns `torch.nn.Transformer` with the embeddings and output of the PyTorch tutorial.

    Post-norm, but with the final norms that are usual in pre-norm models.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.Transformer.html and
    https://docs.pytorch.org/tutorials/beginner/translation_transformer.html
    """
    check_choice("torch", overrides, "norm_position", ("post", "pre"))
    rate = overrides.get("dropout_rate", 0.1)
    values: dict[str, Any] = {
        "attention_dropout_rate": rate,
        "activation_dropout_rate": rate,
        "norm_epsilon": 1e-5,
        "final_norm": True,
        "output_bias": True,
        "tie_embeddings": "none",
        "kernel_init": "torch_transformer",
        "embedding_init": "xavier_uniform",
        "bias_init": "torch_transformer",
    }
    return TransformerConfig(**values | overrides)


def marian(**overrides: Any) -> TransformerConfig:
    """Returns an OPUS-MT model: post-norm, silu, decoding starts from the padding token.

    The defaults of Hugging Face's `MarianConfig` differ: `activation="gelu",
    scale_embeddings=False` and twice the sizes.

    Source: `MarianMTModel`, https://huggingface.co/docs/transformers/model_doc/marian, and
    https://github.com/Helsinki-NLP/Opus-MT
    """
    last_token = overrides.get("target_vocab_size", 0) - 1
    overrides = _special_tokens(overrides, pad_id=last_token, eos_id=0) | overrides
    values: dict[str, Any] = {
        "norm_epsilon": 1e-5,
        "output_bias": True,
        "activation": "silu",
        "position_layout": "concatenated",
        "max_length": 512,
        "mask_target_padding": False,
        "bos_id": overrides.get("pad_id", TransformerConfig.pad_id),
    }
    return TransformerConfig(**values | overrides)


def fairseq(**overrides: Any) -> TransformerConfig:
    """Returns a fairseq model: post-norm by default, decoding starts from the end token.

    Positions are counted from `pad_id` + 1 and over real tokens only: a source that is padded on
    the left, as in fairseq, needs `encoder_positions`. The published embedding norm is applied
    before the dropout of embeddings, ours after it.

    Source: https://github.com/facebookresearch/fairseq (fairseq/models/transformer)
    """
    check_choice("fairseq", overrides, "norm_position", ("post", "pre"))
    check_choice("fairseq", overrides, "activation", ("relu", "gelu", "gelu_tanh"))
    check_choice("fairseq", overrides, "position_kind", ("sinusoidal", "learned", "none"))
    overrides = _special_tokens(overrides, pad_id=1, eos_id=2) | overrides
    values: dict[str, Any] = {
        "norm_epsilon": 1e-5,
        "final_norm": overrides.get("norm_position") == "pre",
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
        "position_offset": overrides.get("pad_id", TransformerConfig.pad_id) + 1,
        "zero_pad_embeddings": True,
        "tie_embeddings": "none",
        "bos_id": overrides.get("eos_id", TransformerConfig.eos_id),
        "kernel_init": "fairseq",
        "bias_init": "fairseq",
    }
    return TransformerConfig(**values | overrides)


def opennmt(**overrides: Any) -> TransformerConfig:
    """Returns an OpenNMT-py model: pre-norm with final norms, by default without biases.

    These are the options of version 3. Models of version 2 have `qkv_bias=True,
    feed_forward_bias=True`.

    Source: https://github.com/OpenNMT/OpenNMT-py (onmt/encoders/transformer.py,
    onmt/decoders/transformer.py)
    """
    # The published "silu" is another network: a gate with a matrix of its own.
    check_choice("opennmt", overrides, "activation", ("relu", "gelu"))
    kinds = ("sinusoidal", "rotary", "alibi", "t5_relative", "none")
    check_choice("opennmt", overrides, "position_kind", kinds)
    overrides = _special_tokens(overrides, pad_id=1, bos_id=2, eos_id=3) | overrides
    kind = overrides.get("position_kind", "sinusoidal")
    sinusoidal = kind == "sinusoidal"
    concatenated = sinusoidal and overrides.get("position_layout") == "concatenated"
    values: dict[str, Any] = {
        "attention_dropout_rate": 0.1,  # independent of dropout_rate
        "activation_dropout_rate": overrides.get("dropout_rate", 0.1),
        "norm_position": "pre",
        "final_norm": True,
        "qkv_bias": False,
        "attention_output_bias": overrides.get("qkv_bias", False),
        "feed_forward_bias": False,
        "output_bias": True,
        "position_exponent": "tensor2tensor" if concatenated else "paper",
        "scale_embeddings": sinusoidal,
        "tie_embeddings": "none",
        "embedding_init": "xavier_uniform",
    }
    if kind == "t5_relative":
        values["relative_position_sharing"] = "layer"
    return TransformerConfig(**values | overrides)


def mbart(**overrides: Any) -> TransformerConfig:
    """Returns an mBART model: pre-norm, learned positions, a norm after the embeddings.

    BART has the same tensors, post-norm: `norm_position="post", scale_embeddings=False`. The
    published embedding norm is applied before the dropout of embeddings, ours after it, and
    published initial values are normal with standard deviation 0.02.

    Source: `MBartForConditionalGeneration` and `BartForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/mbart; Liu et al. 2020.
    """
    check_choice("mbart", overrides, "norm_position", ("pre", "post"))
    overrides = _special_tokens(overrides, pad_id=1, eos_id=2) | overrides
    values: dict[str, Any] = {
        "norm_position": "pre",
        "norm_epsilon": 1e-5,
        "embedding_norm": True,
        "final_norm": overrides.get("norm_position", "pre") == "pre",
        "output_bias": True,
        "activation": "gelu",
        "position_kind": "learned",
        "position_offset": 2,  # independent of pad_id
        "mask_target_padding": False,
        "bos_id": overrides.get("eos_id", TransformerConfig.eos_id),
    }
    return TransformerConfig(**values | overrides)


def m2m100(**overrides: Any) -> TransformerConfig:
    """Returns an M2M-100 or NLLB model: pre-norm, fairseq's sinusoids, one table of embeddings.

    Published initial values are normal with standard deviation 0.02.

    Source: `M2M100ForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/m2m_100; Fan et al. 2021, NLLB Team 2022.
    """
    overrides = _special_tokens(overrides, pad_id=1, eos_id=2) | overrides
    values: dict[str, Any] = {
        "norm_position": "pre",
        "norm_epsilon": 1e-5,
        "final_norm": True,
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
        "position_offset": overrides.get("pad_id", TransformerConfig.pad_id) + 1,
        "mask_target_padding": False,
        "bos_id": overrides.get("eos_id", TransformerConfig.eos_id),
    }
    return TransformerConfig(**values | overrides)


def pegasus(**overrides: Any) -> TransformerConfig:
    """Returns a Pegasus model: pre-norm, the positions of Marian, one table of embeddings.

    Published initial values are normal with standard deviation 0.02.

    Source: `PegasusForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/pegasus; Zhang et al. 2020.
    """
    overrides = _special_tokens(overrides, pad_id=0, eos_id=1) | overrides
    values: dict[str, Any] = {
        "norm_position": "pre",
        "norm_epsilon": 1e-5,
        "final_norm": True,
        "output_bias": True,
        "position_layout": "concatenated",
        "mask_target_padding": False,
        "bos_id": overrides.get("pad_id", TransformerConfig.pad_id),
    }
    return TransformerConfig(**values | overrides)


def fsmt(**overrides: Any) -> TransformerConfig:
    """Returns an FSMT model: post-norm, fairseq's sinusoids, a target table that is the output.

    Published initial values are normal with standard deviation 0.02.

    Source: `FSMTForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/fsmt; Ng et al. 2019.
    """
    overrides = _special_tokens(overrides, pad_id=1, eos_id=2) | overrides
    values: dict[str, Any] = {
        "norm_epsilon": 1e-5,
        "position_layout": "concatenated",
        "position_exponent": "tensor2tensor",
        "position_offset": overrides.get("pad_id", TransformerConfig.pad_id) + 1,
        "tie_embeddings": "target_output",
        "bos_id": overrides.get("eos_id", TransformerConfig.eos_id),
    }
    return TransformerConfig(**values | overrides)


def t5(**overrides: Any) -> TransformerConfig:
    """Returns a T5 model: pre-norm with root-mean-square norms, relative positions, no biases.

    T5 1.1, mT5 and Flan-T5 have `feed_forward_gate=True, activation="gelu_tanh"` and
    `tie_embeddings="source_target"`. Logits are scaled only where the output is tied. The published
    dropout after the final norms is left out. An untied output starts with standard deviation
    1/sqrt(D), that of Hugging Face with 1.

    Source: `T5ForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/t5; Raffel et al. 2020.
    """
    check_choice("t5", overrides, "tie_embeddings", ("all", "source_target"))
    if overrides.get("feed_forward_gate"):
        check_choice("t5", overrides, "activation", ("relu", "gelu_tanh", "silu"))
    overrides = _special_tokens(overrides, pad_id=0, eos_id=1) | overrides
    rate = overrides.get("dropout_rate", 0.1)
    values: dict[str, Any] = {
        "head_dim": 64,
        "attention_dropout_rate": rate,
        "activation_dropout_rate": rate,
        "norm_position": "pre",
        "norm_kind": "rms",
        "final_norm": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "feed_forward_bias": False,
        "position_kind": "t5_relative",
        "scale_scores": False,
        "scale_embeddings": False,
        "scale_logits": overrides.get("tie_embeddings", "all") == "all",
        "mask_target_padding": False,
        "train_pad_embedding": True,
        "bos_id": overrides.get("pad_id", TransformerConfig.pad_id),
        "kernel_init": "normal",
        "embedding_init": "standard_normal",
    }
    return TransformerConfig(**values | overrides)


def umt5(**overrides: Any) -> TransformerConfig:
    """Returns a UMT5 model: T5 1.1 with relative positions of its own in every layer.

    The output is tied to the embeddings, and scaled unless the checkpoint says otherwise.

    Source: `UMT5ForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/umt5; Chung et al. 2023.
    """
    is_gated = overrides.get("feed_forward_gate", True)
    values: dict[str, Any] = {
        "feed_forward_gate": is_gated,
        "activation": "gelu_tanh" if is_gated else "relu",
        "relative_position_sharing": "layer",
    }
    return t5(**values | overrides)


def t5gemma(**overrides: Any) -> TransformerConfig:
    """Returns a T5Gemma model: Gemma 2 with an encoder, two norms in each sub-layer, no biases.

    Both stacks have the same widths. Scores are divided by sqrt(K), as in all published models. The
    embedding scale sqrt(D) is rounded to the compute dtype, as it is there. The published dropout
    after the final norms is left out. Published initial values have standard deviation 0.02.

    Source: `T5GemmaForConditionalGeneration`,
    https://huggingface.co/docs/transformers/model_doc/t5gemma; Zhang et al. 2025.
    """
    check_choice("t5gemma", overrides, "tie_embeddings", ("target_output", "none"))
    overrides = _special_tokens(overrides, pad_id=0, bos_id=2, eos_id=1) | overrides
    values: dict[str, Any] = {
        "dropout_rate": 0.0,
        "activation_dropout_rate": overrides.get("dropout_rate", 0.0),
        "norm_position": "both",
        "norm_kind": "rms_offset",
        "final_norm": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "feed_forward_bias": False,
        "feed_forward_gate": True,
        "activation": "gelu_tanh",
        "position_kind": "rotary",
        "position_layout": "concatenated",
        "attention_window": 4096,
        "score_cap": 50.0,
        "logit_cap": 30.0,
        "tie_embeddings": "target_output",
        "kernel_init": "normal",
    }
    return TransformerConfig(**values | overrides)


def _special_tokens(overrides: dict[str, Any], **published: int) -> dict[str, Any]:
    return published if overrides.get("target_vocab_size") else {}


def check_choice(
    family: str, overrides: Mapping[str, Any], name: str, choices: tuple[str, ...]
) -> None:
    """Raises a `UserError` with the choices, unless the published code has the value of a field."""
    if overrides.get(name, choices[0]) not in choices:
        raise UserError(
            f"{family} has no {name}={overrides[name]}: choose one of {', '.join(choices)}"
        )


FAMILIES: dict[str, Callable[..., TransformerConfig]] = {
    published.__name__: published
    for published in (
        jadore801120, double_projection, annotated_wide_heads, annotated, tunz, torch, marian,
        fairseq, opennmt, mbart, m2m100, pegasus, fsmt, t5, umt5, t5gemma,
    )
}  # fmt: skip
"""The preset of each family, by name."""

FAMILY_ALIASES = {"notebook": "double_projection", "questions": "annotated_wide_heads"}
"""Former names of families, which are still accepted wherever a family is given by name."""
