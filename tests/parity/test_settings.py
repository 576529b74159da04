"""Settings: what a checkpoint or a module says of itself reaches both sides, or is named."""

import argparse
import warnings

import numpy as np
import opus_mt
import pytest
import torch
from toy_references import Variant

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity import compare, example
from flaxformer_mt.parity.families import published as checkpoints
from flaxformer_mt.parity.families.check import check_family
from flaxformer_mt.presets import preset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import MarianMTModel

ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}


def jadore801120():
    sizes = {"head_dim": 5, "value_dim": 3, "source_vocab_size": 11, "pad_id": 3}
    scales = {"scale_embeddings": True, "scale_logits": False}
    module = Variant("jadore801120", ONE_LAYER | sizes | scales).build()
    settings = {
        "n_head": 4, "d_k": 5, "d_v": 3, "d_model": 16, "d_inner_hid": 24, "dropout": 0.1,
        "src_pad_idx": 3, "trg_pad_idx": 3, "scale_emb_or_prj": "emb", "proj_share_weight": True,
        "embs_share_weight": True,
    }  # fmt: skip
    return {"epoch": 3, "settings": argparse.Namespace(**settings), "model": module.state_dict()}


@pytest.mark.slow
def test_what_a_checkpoint_says_of_itself_reaches_both_sides(tmp_path):
    path = tmp_path / "published.pt"
    torch.save(jadore801120(), path)
    report = check_family("jadore801120", checkpoint=path)
    assert report.passed, report


def test_special_tokens_follow_the_published_vocabulary():
    checkpoint = jadore801120()
    checkpoint["settings"].src_pad_idx = checkpoint["settings"].trg_pad_idx = 1
    config, _ = interop.load("jadore801120", checkpoint)
    assert (config.pad_id, config.bos_id, config.eos_id) == (1, 2, 3)
    config, _ = interop.load("jadore801120", checkpoint, bos_id=5)
    assert (config.pad_id, config.bos_id, config.eos_id) == (1, 5, 3)


def test_two_padding_ids_are_refused():
    checkpoint = jadore801120()
    checkpoint["settings"].trg_pad_idx = 1
    with pytest.raises(UserError, match="sources are padded with 3 and targets with 1: unsup"):
        interop.load("jadore801120", checkpoint)


def test_the_folder_of_a_whole_model_is_a_checkpoint(tmp_path):
    codes = "abcdefghij"
    spm = [opus_mt.train_model([" ".join(codes)] * 30, 24) for _ in range(2)]
    vocabularies = opus_mt.write_tokenizer(tmp_path, *spm)
    opus_mt.random_model(opus_mt.config(vocabularies)).save_pretrained(tmp_path)
    model = checkpoints.read("marian", tmp_path)
    config = model.configure({})
    module = model.reference(config, "float64", "exact")
    published = MarianMTModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    tokens = torch.arange(2, 8)[None]
    assert config.num_heads == published.config.encoder_attention_heads
    expected = published(input_ids=tokens, decoder_input_ids=tokens).logits
    # Its table of positions is rounded to float32.
    torch.testing.assert_close(module(tokens, tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("annotated", {"pad_id": 1}, r"pad_id=1 collides with bos_id=1: give a pad_id and a bos_i"),
        ("annotated", {"bos_id": 0}, "pad_id=0 collides with bos_id=0"),
        ("annotated", {"eos_id": 0}, "pad_id=0 collides with eos_id=0"),
        ("tunz", {"eos_id": 0}, "pad_id=0 collides with eos_id=0"),
        ("annotated", {"pad_id": 12}, "pad_id=12 is outside of a vocabulary of 11 tokens: give "),
        ("annotated", {"eos_id": 99}, "eos_id=99 is outside of a vocabulary of 11 tokens"),
        ("annotated", {"bos_id": 11}, "bos_id=11 is outside of a vocabulary of 11 tokens"),
    ],
)
def test_special_tokens_that_collide_or_do_not_exist_are_named(family, settings, message):
    with pytest.raises(UserError, match=message):
        check_family(family, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["annotated", "double_projection", "fairseq", "jadore801120", "mbart", "opennmt"],
)
def test_models_without_padding(family):
    report = check_family(family, **ONE_LAYER, pad_id=-1)
    assert report.passed, report


def test_special_tokens_of_a_module_are_checked_too():
    module = Variant("annotated", ONE_LAYER).build()
    tokens = example(preset("annotated", source_vocab_size=13, target_vocab_size=11))
    with pytest.raises(UserError, match="pad_id=1 collides with bos_id=1"):
        compare("annotated", module, tokens, num_heads=4, pad_id=1)


@pytest.mark.slow
def test_wrong_heads_and_padding_of_a_module_are_named():
    module = Variant("torch", ONE_LAYER).build("float64")
    wrong = {"num_heads": 2, "pad_id": 5}
    sizes = {"source_vocab_size": 13, "target_vocab_size": 11}
    report = compare("torch", module, example(preset("torch", **sizes)), **wrong)
    assert not report.passed
    assert [(each.name, each.ours, each.theirs) for each in report.settings] == [
        ("num_heads", 2, 4),
        ("pad_id", 5, 0),
    ]
    assert "settings differ (num_heads, pad_id)" in report.headline()
    explanation = report.explanation()
    assert explanation.startswith("num_heads is 2 here, but 4 in transformer.nhead: give num_heads")
    assert "pad_id is 5 here, but 0 in pad_id" in explanation
    assert not any(site.endswith("/scores") for site in report.untapped)


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_said():
    module = Variant("annotated", ONE_LAYER).build("float64")
    for part in module.modules():
        if hasattr(part, "h"):
            part.h = np.int64(part.h)  # No longer an attribute that is read.
    sizes = {"source_vocab_size": 13, "target_vocab_size": 11}
    report = compare("annotated", module, example(preset("annotated", **sizes)), num_heads=2)
    scores = "encoder/layers/0/self_attention/scores"
    assert not report.settings
    assert report.first_divergence is not None
    assert report.first_divergence.site == scores
    shapes = f"{scores} has shape (4, 4, 7, 7) in the reference, but (4, 2, 7, 7) here: compare"
    assert report.explanation().startswith(shapes)
    assert report.diagnosis is None


def test_annotated_needs_an_even_width():
    with pytest.raises(UserError, match="d_model=15: the published positions need an even"):
        check_family("annotated", **ONE_LAYER, d_model=15, num_heads=3)
