import dataclasses

import pytest

from flaxformer_mt import presets
from flaxformer_mt.errors import UserError

# One switch of each family in which the paper's base model, the default, differs from it.
CHARACTERISTIC = {
    "jadore801120": {"embedding_norm": True, "qkv_bias": False, "scale_logits": True},
    "double_projection": {"position_kind": "none", "norm_epsilon": 1e-5},
    "annotated_wide_heads": {"d_model": 300, "head_dim": 64, "position_base": 10000.0},
    "annotated": {"norm_kind": "unbiased_std", "norm_position": "pre", "position_base": 1000.0},
    "tunz": {"position_exponent": "tensor2tensor", "zero_pad_embeddings": True, "bos_id": -1},
    "torch": {"norm_position": "post", "final_norm": True, "output_bias": True},
    "marian": {"activation": "silu", "position_layout": "concatenated", "max_length": 512},
    "fairseq": {"position_offset": 1, "tie_embeddings": "none", "norm_epsilon": 1e-5},
    "opennmt": {"norm_position": "pre", "feed_forward_bias": False, "output_bias": True},
    "mbart": {"embedding_norm": True, "position_kind": "learned", "position_offset": 2},
    "m2m100": {"norm_position": "pre", "position_exponent": "tensor2tensor"},
    "pegasus": {"norm_position": "pre", "position_layout": "concatenated", "output_bias": True},
    "fsmt": {"position_exponent": "tensor2tensor", "tie_embeddings": "target_output"},
    "umt5": {"relative_position_sharing": "layer", "feed_forward_gate": True},
    "t5gemma": {"norm_kind": "rms_offset", "norm_position": "both", "attention_window": 4096},
    "t5": {"norm_kind": "rms", "scale_scores": False, "train_pad_embedding": True},
}


@pytest.mark.parametrize("family", presets.FAMILIES)
def test_every_preset_has_the_switches_of_its_source_and_takes_overrides(family):
    expected = CHARACTERISTIC[family]
    config = presets.preset(family)
    assert {name: getattr(config, name) for name in expected} == expected
    changed = presets.preset(family, d_ff=64)
    assert changed == dataclasses.replace(config, d_ff=64)


@pytest.mark.parametrize("alias", presets.FAMILY_ALIASES)
def test_former_family_names_are_aliases(alias):
    name = presets.canonical_family(alias)
    assert alias not in presets.FAMILIES
    assert presets.preset(alias, d_ff=64) == presets.preset(name, d_ff=64)
    assert presets.canonical_family(name) == name


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="unknown family 'annotate'"):
        presets.preset("annotate")
    with pytest.raises(UserError, match="unknown model option 'dmodel'"):
        presets.preset("tunz", dmodel=64)


@pytest.mark.parametrize("tying", ["none", "source_target"])
def test_jadore801120_scales_nothing_without_a_tied_output(tying):
    config = presets.jadore801120(tie_embeddings=tying, scale_embeddings=True)
    assert (config.scale_embeddings, config.scale_logits) == (False, False)
    assert presets.jadore801120().scale_logits
    assert not presets.jadore801120(scale_embeddings=True).scale_logits


def test_decoding_starts_from_padding_in_marian_and_from_the_end_token_in_fairseq():
    assert presets.marian(pad_id=7).bos_id == 7
    assert presets.fairseq(eos_id=7).bos_id == 7
    assert presets.fairseq(pad_id=3).position_offset == 4


def special_tokens(config):
    return config.pad_id, config.bos_id, config.eos_id


def test_special_tokens_are_the_run_s_unless_the_vocabulary_is_the_published_one():
    assert special_tokens(presets.marian()) == (0, 0, 2)
    assert special_tokens(presets.fairseq()) == (0, 2, 2)
    assert special_tokens(presets.opennmt()) == (0, 1, 2)
    sizes = {"source_vocab_size": 50, "target_vocab_size": 50}
    assert special_tokens(presets.marian(**sizes)) == (49, 49, 0)
    assert special_tokens(presets.fairseq(**sizes)) == (1, 2, 2)
    assert special_tokens(presets.opennmt(**sizes)) == (1, 2, 3)
    assert special_tokens(presets.fairseq(**sizes, pad_id=0)) == (0, 2, 2)


def test_opennmt_has_attention_biases_all_or_none():
    for bias in (True, False):
        config = presets.opennmt(qkv_bias=bias)
        assert (config.qkv_bias, config.attention_output_bias) == (bias, bias)


def test_what_the_published_code_cannot_do_is_refused():
    with pytest.raises(UserError, match="opennmt has no activation=silu: choose one of relu, gelu"):
        presets.preset("opennmt", activation="silu")
    with pytest.raises(UserError, match="opennmt has no position_kind=learned"):
        presets.preset("opennmt", position_kind="learned")
    with pytest.raises(UserError, match="t5 has no activation=gelu: choose one of relu, gelu_tanh"):
        presets.t5(feed_forward_gate=True, activation="gelu")
    assert presets.t5(activation="gelu").activation == "gelu"
    with pytest.raises(UserError, match="fairseq has no activation=silu"):
        presets.preset("fairseq", activation="silu")


def test_dropout_sites_follow_the_rate_where_the_source_does():
    sites = {
        family: (config.attention_dropout_rate, config.activation_dropout_rate)
        for family in presets.FAMILIES
        for config in [presets.preset(family, dropout_rate=0.3)]
    }
    assert sites == {
        "jadore801120": (0.1, 0.0),
        "double_projection": (0.0, 0.0),
        "annotated_wide_heads": (0.3, 0.3),
        "annotated": (0.1, 0.3),
        "tunz": (0.3, 0.3),
        "torch": (0.3, 0.3),
        "marian": (0.0, 0.0),
        "fairseq": (0.0, 0.0),
        "opennmt": (0.1, 0.3),
        "mbart": (0.0, 0.0),
        "m2m100": (0.0, 0.0),
        "pegasus": (0.0, 0.0),
        "fsmt": (0.0, 0.0),
        "t5": (0.3, 0.3),
        "umt5": (0.3, 0.3),
        "t5gemma": (0.0, 0.3),
    }


def test_annotated_wide_heads_has_wider_heads_than_its_model():
    config = presets.annotated_wide_heads()
    assert (config.d_model, config.num_heads * config.key_width) == (300, 384)


def test_tunz_rounds_head_widths_down():
    assert presets.tunz(d_model=17, num_heads=8).key_width == 2


def test_final_norms_come_with_fairseq_s_pre_norm():
    assert presets.fairseq(norm_position="pre").final_norm
    assert not presets.fairseq().final_norm


def test_opennmt_scales_and_spaces_as_its_positions_want():
    assert presets.opennmt(position_layout="concatenated").position_exponent == "tensor2tensor"
    assert presets.opennmt().position_exponent == "paper"
    assert not presets.opennmt(position_kind="none").scale_embeddings
