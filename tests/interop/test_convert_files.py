"""Conversion of Adam's state, of our own files, and as the command line does it."""

from typing import Any

import pytest
import safetensors.torch
import torch
from flax.traverse_util import flatten_dict
from toy_references import ALL, DOUBLE_PROJECTION, ONE_OF_EACH, UNSCALED_TORCH, VARIANTS
from trained_references import assert_identical, trained_checkpoint

from flaxformer_mt import interop
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert


@pytest.mark.slow_except("t5_gated")
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_to_our_own_file_and_back_is_byte_identical(name, tmp_path):
    variant = ALL[name]
    before = trained_checkpoint(variant)
    torch.save(before, tmp_path / "before.pt")
    own = tmp_path / "own.safetensors"
    convert(variant.family, OWN, tmp_path / "before.pt", own, variant.hints)
    with safetensors.safe_open(own, framework="np") as file:
        assert any(name.startswith("adam/mean/") for name in file.keys())  # noqa: SIM118
    convert(OWN, OWN, own, tmp_path / "again.safetensors")
    convert(OWN, variant.family, tmp_path / "again.safetensors", tmp_path / "after.pt")
    assert_identical(torch.load(tmp_path / "after.pt", weights_only=True), before)


def test_adam_is_converted_where_tensors_are_rearranged(tmp_path):
    variant = VARIANTS["torch_pre_gelu"]
    before = trained_checkpoint(variant)
    torch.save(before, tmp_path / "torch.pt")
    assert convert("torch", "opennmt", *paths(tmp_path, "torch", "opennmt"), variant.hints) == ()
    hints = {"num_heads": 4, "activation": "gelu", "norm_epsilon": 1e-5}
    assert convert("opennmt", "torch", *paths(tmp_path, "opennmt", "again"), hints) == ()
    after = torch.load(tmp_path / "again.pt", weights_only=True)
    assert_identical(after["optimizer"], before["optimizer"])


def paths(folder: Any, *names: str) -> list[Any]:
    return [folder / f"{name}.pt" for name in names]


@pytest.mark.slow
def test_new_biases_have_no_moments(tmp_path):
    variant = VARIANTS["opennmt_unbiased"]
    torch.save(trained_checkpoint(variant), tmp_path / "opennmt.pt")
    convert("opennmt", "torch", *paths(tmp_path, "opennmt", "torch"), variant.hints)
    adam = interop.load_training(
        "torch", tmp_path / "torch.pt", num_heads=4, norm_position="pre", norm_epsilon=1e-6
    ).adam
    mean = flatten_dict(adam.mean, sep="/")
    assert adam.step == 2
    assert mean["decoder/layers/feed_forward/hidden/kernel"].any()
    assert not mean["decoder/layers/feed_forward/hidden/bias"].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "target", "reason"),
    [
        (UNSCALED_TORCH, "opennmt", "scale_embeddings=False becomes True"),
        (DOUBLE_PROJECTION, "torch", "some of them are carried"),
    ],
)
def test_adam_that_cannot_be_converted_is_dropped_with_a_note(variant, target, reason, tmp_path):
    torch.save(trained_checkpoint(variant), tmp_path / "before.pt")
    notes = convert(variant.family, target, *paths(tmp_path, "before", "after"), variant.hints)
    assert notes[-1].startswith("Adam's state is dropped")
    assert reason in notes[-1]
    assert not {"model", "optim"} & torch.load(tmp_path / "after.pt", weights_only=True).keys()


def test_the_state_of_another_optimizer_is_dropped_with_a_note(tmp_path):
    variant = VARIANTS["tunz"]
    reference = variant.build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    sum(parameter.sum() for parameter in reference.parameters()).backward()
    optimizer.step()
    source, target = paths(tmp_path, "before", "after")
    torch.save({"model": reference.state_dict(), "optimizer": optimizer.state_dict()}, source)
    (note,) = convert("tunz", "tunz", source, target, variant.hints)
    assert note.startswith("the optimizer's state is dropped: ")
    assert_identical(torch.load(target, weights_only=True), {**reference.state_dict()})


def test_safetensors_of_a_published_family_contain_no_adam(tmp_path):
    variant = VARIANTS["tunz"]
    torch.save(trained_checkpoint(variant), tmp_path / "before.pt")
    target = tmp_path / "after.safetensors"
    (note,) = convert("tunz", "tunz", tmp_path / "before.pt", target, variant.hints)
    assert "PyTorch reads it from .pt files only" in note


def test_invalid_arguments_are_rejected(tmp_path):
    source, target = paths(tmp_path, "source", "target")
    torch.save(VARIANTS["tunz"].build().state_dict(), source)

    def refused(*arguments: Any) -> str:
        with pytest.raises(UserError) as caught:
            convert(*arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    hints = {"num_heads": 4}
    assert "must not be the input" in refused("tunz", "tunz", source, source, hints)
    assert "--from tuns: unknown family" in refused("tuns", "tunz", source, target)
    assert "--to tuns: unknown family" in refused("tunz", "tuns", source, target)
    assert "written as a folder" in refused("tunz", "ctranslate2", source, target, hints)
    assert "only norm_epsilon" in refused("tunz", "tunz", source, target, hints, ["final_norm"])
    for name in ("pad_id", "eos_id"):
        message = refused("tunz", "tunz", source, target, {**hints, name: 5000})
        assert f"{name}=5000 is outside the vocabulary (0 to 10)" in message
    for family in ("marian-native", "jax", OWN):
        message = refused("tunz", family, source, tmp_path / "model.npz", hints)
        assert "model.npz: .npz is not written" in message
    assert ".safetensors" in refused("tunz", OWN, source, target, hints)
    assert "not a safetensors file, or a damaged one" in refused(OWN, "tunz", source, target)
    foreign = tmp_path / "foreign.safetensors"
    convert("tunz", "tunz", source, foreign, hints)
    assert "no configuration" in refused(OWN, "tunz", foreign, target)
    own = tmp_path / "own.safetensors"
    convert("tunz", OWN, source, own, hints)
    assert "it contains num_heads: fields cannot be overridden" in refused(
        OWN, "tunz", own, target, hints
    )
    assert not target.exists()


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": OWN},
        {"format": OWN, "config": "{"},
        {"format": OWN, "config": "[[1]]"},
        {"format": OWN, "config": "{}", "adam_step": "two", "adam_settings": "{}"},
        {"format": OWN, "config": "{}", "adam_step": "2", "adam_settings": "[]"},
        {"format": OWN, "config": "{}", "adam_step": "-2", "adam_settings": "{}"},
        {"format": OWN, "config": "{}", "adam_step": "9" * 5000, "adam_settings": "{}"},
        {"format": OWN, "config": "{}", "adam_step": "2", "adam_settings": "[" * 100_000},
        {"format": OWN, "config": "[" * 100_000},
        {"format": OWN, "config": '{"d_model":' + "1" * 5000 + "}"},
    ],
)
def test_damaged_metadata_of_our_own_file_is_rejected(metadata, tmp_path):
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file({"output/bias": torch.zeros(3)}, path, metadata)
    with pytest.raises(UserError, match=r"own\.safetensors as flaxformer_mt: its metadata is"):
        convert(OWN, "tunz", path, tmp_path / "tunz.pt")


@pytest.mark.parametrize("name", ["carried/x", "adam/x", "adam/mean/x"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_tensors_that_nothing_reads_are_refused(tmp_path, name, is_trained):
    variant = VARIANTS["torch_pre_gelu"]
    before = trained_checkpoint(variant)
    torch.save(before if is_trained else before["model"], tmp_path / "torch.pt")
    own = tmp_path / "own.safetensors"
    convert("torch", OWN, tmp_path / "torch.pt", own, variant.hints)
    with safetensors.safe_open(own, framework="pt") as file:
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    safetensors.torch.save_file(tensors | {name: torch.zeros(3)}, own, metadata)
    with pytest.raises(UserError, match=r"own.safetensors as flaxformer_mt: .*\bx\b"):
        convert(OWN, OWN, own, tmp_path / "again.safetensors")
