import pytest

from flaxformer_mt import presets
from flaxformer_mt.errors import UserError


@pytest.mark.parametrize("family", presets.FAMILIES)
def test_every_preset_is_valid_at_its_default_sizes(family):
    config = presets.preset(family)
    assert config == presets.FAMILIES[family]()
    assert presets.preset(family, d_ff=64).d_ff == 64


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="unknown family 'annotate'"):
        presets.preset("annotate")
    with pytest.raises(UserError, match="unknown model option 'dmodel'"):
        presets.preset("tunz", dmodel=64)


def test_dropout_sites_follow_the_rate_where_the_source_does():
    sites = {
        family: (config.attention_dropout_rate, config.activation_dropout_rate)
        for family in presets.FAMILIES
        for config in [presets.preset(family, dropout_rate=0.3)]
    }
    assert sites == {
        "jadore801120": (0.1, 0.0),
        "notebook": (0.0, 0.0),
        "questions": (0.3, 0.3),
        "annotated": (0.1, 0.3),
        "tunz": (0.3, 0.3),
        "torch": (0.3, 0.3),
    }


@pytest.mark.parametrize("tying", ["none", "source_target"])
def test_jadore801120_scales_nothing_without_a_tied_output(tying):
    config = presets.jadore801120(tie_embeddings=tying, scale_embeddings=True)
    assert (config.scale_embeddings, config.scale_logits) == (False, False)
    assert presets.jadore801120().scale_logits
    assert not presets.jadore801120(scale_embeddings=True).scale_logits


def test_questions_has_wider_heads_than_its_model():
    config = presets.questions()
    assert (config.d_model, config.num_heads * config.key_width) == (300, 384)


def test_tunz_rounds_head_widths_down():
    assert presets.tunz(d_model=17, num_heads=8).key_width == 2
