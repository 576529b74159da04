"""Small PyTorch references of every family and variant, for tests of `parity` and `interop`."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from flaxformer_mt import interop
from flaxformer_mt.parity import references

# Sizes differ wherever they can, so that mistaking one axis for another changes a shape.
SIZES = {
    "source_vocab_size": 13,
    "target_vocab_size": 11,
    "d_model": 16,
    "num_heads": 4,
    "d_ff": 24,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}
ONE_VOCABULARY = {"source_vocab_size": 11}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One reference, with the switches that `interop.load` cannot infer from its tensors."""

    family: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    also_open: frozenset[str] = frozenset()
    """Fields that the reference can have, but checkpoints of the family are refused with."""

    @property
    def weight_map(self) -> str | interop.Family:
        """Returns the family for `parity.compare`."""
        if not self.also_open:
            return self.family
        family = interop.FAMILIES[self.family]
        return dataclasses.replace(family, open_switches=family.open_switches | self.also_open)

    def build(self, param_dtype: str = "float32", seed: int = 0) -> torch.nn.Module:
        """Returns the reference without dropout; no bias or norm has its initial value."""
        torch.manual_seed(seed)
        sizes = {"param_dtype": param_dtype} | SIZES | self.sizes
        return references.perturb(references.build(self.family, **sizes)).eval()

    @property
    def hints(self) -> dict[str, Any]:
        """Returns the keyword arguments that `interop.load` needs."""
        sizes = SIZES | self.sizes
        return {"num_heads": sizes["num_heads"]} | self.overrides


def _jadore801120() -> dict[str, Variant]:
    tyings = {
        "all": ONE_VOCABULARY | {"tie_embeddings": "all"},
        "source": ONE_VOCABULARY | {"tie_embeddings": "source_target"},
        "output": {"tie_embeddings": "target_output"},
        "none": {"tie_embeddings": "none"},
    }
    scales = {
        "emb": {"scale_embeddings": True, "scale_logits": False},
        "prj": {"scale_embeddings": False, "scale_logits": True},
        "unscaled": {"scale_embeddings": False, "scale_logits": False},
    }
    heads = {"head_dim": 5, "value_dim": 3}
    return {
        f"jadore801120_{scale}_{tying}": Variant(
            "jadore801120", heads | scales[scale] | tyings[tying], scales[scale]
        )
        for scale in scales
        for tying in tyings
    }


def _marian() -> dict[str, Variant]:
    gelu = {"activation": "gelu", "scale_embeddings": False}
    relu = {"activation": "relu"}
    odd_width = {"d_model": 15, "num_heads": 5}
    variants = {
        "all": (ONE_VOCABULARY | {"tie_embeddings": "all"}, {}),
        "source": (ONE_VOCABULARY | {"tie_embeddings": "source_target"}, {}),
        "output_gelu_unscaled": ({"tie_embeddings": "target_output"} | gelu, gelu),
        "none_relu_odd_width": ({"tie_embeddings": "none"} | odd_width | relu, relu),
    }
    return {
        f"marian_{name}": Variant("marian", {"max_length": 20} | sizes, overrides)
        for name, (sizes, overrides) in variants.items()
    }


def _fairseq() -> dict[str, Variant]:
    gelu = {"activation": "gelu_tanh", "scale_embeddings": False}
    odd_width = {"d_model": 15, "num_heads": 5}
    variants = {
        "post_shared": (ONE_VOCABULARY | {"tie_embeddings": "all"}, {}),
        "pre_odd_width": ({"norm_position": "pre"} | odd_width, {}),
        "embedding_norm_gelu_unscaled": ({"embedding_norm": True} | gelu, gelu),
        "learned": ({"position_kind": "learned", "max_length": 9, "norm_position": "pre"}, {}),
        "no_positions": (
            {"position_kind": "none", "tie_embeddings": "target_output"},
            {"position_kind": "none"},
        ),
    }
    return {
        f"fairseq_{name}": Variant("fairseq", sizes, overrides)
        for name, (sizes, overrides) in variants.items()
    }


def _opennmt() -> dict[str, Variant]:
    biases = {"qkv_bias": True, "feed_forward_bias": True}
    gelu = {"activation": "gelu", "norm_epsilon": 1e-5}
    variants = {
        "unbiased": ({}, {}),
        "shared": (biases | ONE_VOCABULARY | {"tie_embeddings": "all"}, {}),
        "tied_output_gelu": ({"tie_embeddings": "target_output", "qkv_bias": True} | gelu, gelu),
        "concatenated": ({"position_layout": "concatenated", "feed_forward_bias": True}, {}),
        "no_positions": ({"position_kind": "none"}, {}),
        # Bare state dicts do not tell positions that have no tensors.
        **{
            name: (fields | sizes, fields)
            for name, (fields, sizes) in _attention_positions().items()
        },
    }
    return {
        f"opennmt_{name}": Variant("opennmt", sizes, overrides)
        for name, (sizes, overrides) in variants.items()
    }


def _attention_positions() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Fields that `interop.load` has to be told, and other sizes."""
    # Within the toy sentences, distances reach every kind of bucket.
    t5 = {"position_kind": "t5_relative", "relative_position_max_distance": 5}
    buckets = {"relative_position_buckets": 8}
    return {
        "rotary": ({"position_kind": "rotary"}, {"qkv_bias": True}),
        "rotary_halves": ({"position_kind": "rotary", "position_layout": "concatenated"}, {}),
        # Their number is no power of two.
        "alibi": ({"position_kind": "alibi"}, {"d_model": 18, "num_heads": 6}),
        "t5": (t5, buckets),
        "t5_shared": (t5 | {"relative_position_sharing": "stack"}, buckets),
    }


def _hub() -> dict[str, Variant]:
    """Families of the Hugging Face Hub with one table of embeddings."""
    bart = {"norm_position": "post", "scale_embeddings": False}
    silu = {"activation": "silu", "scale_embeddings": False}
    # Within the toy sentences, distances reach every kind of bucket.
    t5 = {"relative_position_buckets": 8, "head_dim": 5}
    distance = {"relative_position_max_distance": 5}
    # Shorter than the toy sentences.
    window, grouped = {"attention_window": 2}, {"num_kv_heads": 2, "head_dim": 6}
    plain = {"attention_window": 0, "score_cap": 0.0, "logit_cap": 0.0}
    gated = {
        "feed_forward_gate": True,
        "activation": "gelu_tanh",
        "tie_embeddings": "source_target",
    }
    return {
        "mbart": Variant("mbart", ONE_VOCABULARY | {"max_length": 20}),
        "mbart_bart": Variant(
            "mbart", ONE_VOCABULARY | {"max_length": 20} | bart, {"scale_embeddings": False}
        ),
        "m2m100": Variant("m2m100", ONE_VOCABULARY | {"max_length": 20}),
        "m2m100_odd_width_silu": Variant(
            "m2m100", ONE_VOCABULARY | {"d_model": 15, "num_heads": 5} | silu, silu
        ),
        "t5_gated": Variant("t5", ONE_VOCABULARY | t5 | gated | distance, distance),
        "t5": Variant("t5", ONE_VOCABULARY | t5 | distance, distance),
        "umt5": Variant("umt5", ONE_VOCABULARY | t5 | distance, distance),
        "fsmt": Variant("fsmt", {"max_length": 20}),
        "fsmt_shared": Variant(
            "fsmt", ONE_VOCABULARY | {"max_length": 20, "tie_embeddings": "all"}
        ),
        "pegasus": Variant("pegasus", ONE_VOCABULARY | {"max_length": 20}),
        "t5gemma": Variant("t5gemma", grouped | window, window),
        "t5gemma_untied_uncapped": Variant(
            "t5gemma", grouped | plain | {"tie_embeddings": "none"}, plain
        ),
    }


VARIANTS: dict[str, Variant] = _jadore801120() | {
    "annotated_1000_shared": Variant("annotated", {"source_attention": "self_attn"}),
    "annotated_1000": Variant("annotated"),
    "annotated_10000": Variant("annotated", {"position_base": 10000.0}),
    "annotated_wide_heads": Variant("annotated_wide_heads", {"d_model": 300, "num_heads": 6}),
    "tunz": Variant("tunz", ONE_VOCABULARY),
    "tunz_two_tables": Variant("tunz", {"tie_embeddings": "target_output"}),
    "tunz_language_model": Variant("tunz", {"has_inputs": False}),
    "tunz_odd_width": Variant("tunz", ONE_VOCABULARY | {"d_model": 17}),
    "torch_post": Variant("torch"),
    "torch_pre_gelu": Variant(
        "torch",
        {"norm_position": "pre", "activation": "gelu", "batch_first": True},
        {"norm_position": "pre", "activation": "gelu"},
    ),
    **_marian(),
    **_fairseq(),
    **_opennmt(),
    **_hub(),
}
"""Variants that map tokens to logits: all but `double_projection`, which is layers only."""

GROUPED_QUERIES = Variant(
    "opennmt",
    {"num_kv_heads": 2, "qkv_bias": True},
    {"num_kv_heads": 2},
    frozenset({"num_kv_heads"}),
)
UNSCALED_TORCH = Variant(
    "torch",
    {"norm_position": "pre", "scale_embeddings": False},
    {"norm_position": "pre", "scale_embeddings": False},
)
DOUBLE_PROJECTION = Variant("double_projection")
ALL = VARIANTS | {"double_projection": DOUBLE_PROJECTION}
ONE_OF_EACH = {variant.family: name for name, variant in reversed(ALL.items())}
"""The first variant of every family."""


def others_are_slow(
    names: Iterable[Any] = tuple(ALL), quick: Collection[Any] = tuple(ONE_OF_EACH.values())
) -> list[Any]:
    """Parameters of a test, of which one variant of every family, or `quick`, run by default."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
