"""Invalid checkpoints are rejected with a one-line message that names the problem."""

import errno
import os
import pickle
import re
import sys
import zipfile

import numpy as np
import pytest
import torch
from toy_references import DOUBLE_PROJECTION, VARIANTS

from flaxformer_mt import interop
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats import own_format
from flaxformer_mt.interop.weight_maps.adam_state import TrainingState

FAMILIES = {
    "jadore801120": VARIANTS["jadore801120_prj_all"],
    "double_projection": DOUBLE_PROJECTION,
    "annotated_wide_heads": VARIANTS["annotated_wide_heads"],
    "annotated": VARIANTS["annotated_1000"],
    "tunz": VARIANTS["tunz"],
    "torch": VARIANTS["torch_post"],
    "marian": VARIANTS["marian_all"],
    "fairseq": VARIANTS["fairseq_post_shared"],
    "opennmt": VARIANTS["opennmt_shared"],
}


def state_dict(family):
    return FAMILIES[family].build().state_dict()


def refusal(family, source, **overrides) -> str:
    hints = FAMILIES[family].hints | overrides
    with pytest.raises(UserError) as caught:
        interop.load(family, source, **{k: v for k, v in hints.items() if v is not None})
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.slow_except("marian", "tunz")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_named(family):
    state = state_dict(family)
    config, _ = interop.load(family, state, **FAMILIES[family].hints)
    weight_map = interop.FAMILIES[family]
    for name in state.keys() - weight_map.omitted(config) - weight_map.constants:
        message = refusal(family, {k: v for k, v in state.items() if k != name})
        assert f"tensor {name} is missing" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unexpected_tensor_is_named(family):
    message = refusal(family, state_dict(family) | {"encoder.extra.weight": torch.zeros(3)})
    assert "encoder.extra.weight is unexpected" in message


@pytest.mark.slow_except("marian")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_wrong_shape_is_named(family):
    state = state_dict(family)
    for name, tensor in state.items():
        wrong = torch.cat([tensor, tensor[..., :1]], dim=-1)
        assert name in refusal(family, state | {name: wrong})
        assert name in refusal(family, state | {name: tensor.sum()})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_dtype_is_named(family):
    state = state_dict(family)
    name = next(name for name in state if "norm" in name)
    for dtype in (torch.int32, torch.float16, torch.bfloat16, torch.float64):
        message = refusal(family, state | {name: state[name].to(dtype)})
        assert name in message
        assert str(dtype).removeprefix("torch.") in message


REFUSED = [
    ("tunz", {"num_heads": None}, "give num_heads="),
    ("tunz", {"num_heads": 7}, "num_heads=7 does not divide"),
    ("tunz", {"d_model": 32}, "d_model=32 was given, but the tensors have 16"),
    ("tunz", {"norm_position": "post"}, "tunz has norm_position=pre, not post"),
    ("tunz", {"heads": 4}, "unknown model option 'heads'"),
    (
        "annotated",
        {"position_base": 500.0},
        "src_embed.1.pe is not the table of d_model=16 and position_base=500.0",
    ),
]


def test_overrides_that_do_not_fit_are_refused():
    for family, overrides, message in REFUSED:
        assert message in refusal(family, state_dict(family), **overrides)
    assert "version is a int" in refusal("tunz", state_dict("tunz") | {"version": 3})
    assert "3 is not the name of a tensor" in refusal("tunz", {3: torch.zeros(2)})
    with pytest.raises(UserError, match="unknown family 'tuns'"):
        interop.load("tuns", {})


def test_tensors_that_should_be_tied_must_be_equal():
    state = state_dict("jadore801120")
    name = "trg_word_prj.weight"
    message = refusal("jadore801120", state | {name: state[name] + 1}, tie_embeddings="all")
    assert f"decoder.trg_word_emb.weight and {name} must be equal to be tied, but differ" in message


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def unfit_files(folder):
    good = folder / "good.pt"
    torch.save(state_dict("tunz"), good)
    variant = FAMILIES["tunz"]
    config, params = interop.load("tunz", good, **variant.hints)
    interop.save("tunz", config, params, folder / "good.safetensors")
    (folder / "truncated.pt").write_bytes(good.read_bytes()[:2000])
    whole = (folder / "good.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[:2000])
    (folder / "headless.safetensors").write_bytes(whole[:5])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("not a checkpoint\n")
    (folder / "evil.pkl").write_bytes(pickle.dumps({"weight": Evil()}))
    torch.save({"model": Evil()}, folder / "evil.pt")
    torch.save([torch.zeros(3)], folder / "list.pt")
    torch.save({"net": {"weight": torch.zeros(3)}}, folder / "unknown.pt")
    torch.save({}, folder / "nothing.pt")
    with zipfile.ZipFile(folder / "zip.pt", "w") as archive:
        archive.writestr("readme.txt", "no checkpoint")
    # safetensors headers that describe more data than the file contains.
    (folder / "long.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    (folder / "lying.safetensors").write_bytes(whole.replace(b"[11,16]", b"[99,16]"))
    (folder / "folder.pt").mkdir()
    return sorted(set(folder.iterdir()) - {good, folder / "good.safetensors"})


def test_unfit_files_are_refused_by_name_and_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in [*unfit_files(tmp_path), tmp_path / "absent.pt"]:
        message = refusal("tunz", path)
        assert str(path) in message
        assert "weights_only" not in message
    assert "loading would run posix.mkdir, so it was stopped" in refusal(
        "tunz", tmp_path / "evil.pt"
    )
    assert not (tmp_path / "evil").exists()


def test_unfit_files_are_not_converted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    unfit = [*unfit_files(tmp_path), tmp_path / "absent.pt"]
    before = set(tmp_path.iterdir())
    for path in unfit:
        for family, hints in (("tunz", ["--set", "num_heads=4"]), ("flaxformer_mt", [])):
            options = ["--from", family, "--to", "tunz", *hints]
            assert main(["convert", str(path), "after.pt", *options]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            # A folder may be a run or a published model.
            told = " " if path.is_dir() else f" as {family}: "
            assert err.startswith(f"flaxformer-mt: error: {path}{told}")
            assert err.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "secret.pt"
    torch.save(state_dict("tunz"), path)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Privileged users can read every file, whatever its permissions.
    monkeypatch.setattr(os, "open", refuse)
    assert "cannot be read: Permission denied" in refusal("tunz", path)


def test_pytorch_files_need_pytorch(tmp_path, monkeypatch):
    torch.save(state_dict("tunz"), tmp_path / "model.pt")
    hints = FAMILIES["tunz"].hints
    config, params = interop.load("tunz", tmp_path / "model.pt", **hints)
    monkeypatch.setitem(sys.modules, "torch", None)
    extra = r"a PyTorch file needs PyTorch: pip install 'flaxformer_mt\[parity\]'"
    with pytest.raises(UserError, match="reading " + extra):
        interop.load("tunz", tmp_path / "model.pt", **hints)
    with pytest.raises(UserError, match="writing " + extra):
        interop.save("tunz", config, params, tmp_path / "copy.pt")
    interop.save("tunz", config, params, tmp_path / "copy.safetensors")
    interop.load("tunz", tmp_path / "copy.safetensors", **hints)


def test_saving_refuses_what_cannot_be_written(tmp_path):
    variant = FAMILIES["tunz"]
    config, params = interop.load("tunz", state_dict("tunz"), **variant.hints)

    def refused(family, config, params, path) -> str:
        with pytest.raises(UserError) as caught:
            interop.save(family, config, params, path)
        return str(caught.value)

    path = tmp_path / "model.pt"
    assert "suffix" in refused("tunz", config, params, tmp_path / "model.npz")
    (tmp_path / "file").touch()
    assert "is not a folder" in refused("tunz", config, params, tmp_path / "file" / "model.pt")
    assert "annotated has norm_kind=unbiased_std" in refused("annotated", config, params, path)
    without = {k: v for k, v in params.items() if k != "target_embedding"}
    assert "target_embedding/embedding is missing" in refused("tunz", config, without, path)
    wrong = params | {"target_embedding": {"embedding": np.zeros((2, 16), np.float32)}}
    assert "has shape (2, 16)" in refused("tunz", config, wrong, path)
    extra = params | {"output": {"bias": np.zeros(11, np.float32)}}
    assert "output/bias is unexpected" in refused("tunz", config, extra, path)
    half = params | {"target_embedding": {"embedding": np.zeros((11, 16), np.float16)}}
    assert "is float16" in refused("tunz", config, half, path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("family", ["tunz", "opennmt", "fairseq", "marian"])
@pytest.mark.parametrize("index", ["999999999", "9" * 5000, "\N{ARABIC-INDIC DIGIT THREE}", "01"])
def test_an_index_of_a_layer_that_does_not_exist_is_named(family, index):
    state = state_dict(family)
    name = next(name for name in state if re.search(r"\.0\..*norm.*weight", name))
    message = refusal(family, state | {name.replace(".0.", f".{index}.", 1): state[name]})
    assert index[:20] in message


def test_a_layer_without_tensors_is_named():
    state = {
        name.replace("encoder.layers.1.", "encoder.layers.2."): tensor
        for name, tensor in state_dict("tunz").items()
    }
    message = "it has tensors encoder.layers.2.*, but no encoder.layers.1.*"
    assert message in refusal("tunz", state)


WRONG_TYPES = [
    ({"heads": "2"}, "num_heads='2': must be an integer"),
    ({"heads": 10**9}, "num_heads=1000000000: must be at most"),
    ({"heads": float("nan")}, "num_heads=nan: must be an integer"),
    ({"heads": 2, "dropout": []}, "its settings are damaged"),
    ({"heads": 2, "rotary_interleave": "yes"}, "rotary_interleave: expected true or false"),
    ({"heads": 2, "dropout": float("inf")}, "dropout_rate=inf: must be at most"),
    ({"heads": 2, "pos_ffn_activation_fn": ["relu"]}, "cannot have pos_ffn_activation_fn=['relu"),
    ({"heads": 2, "norm_eps": torch.zeros(3)}, "norm_epsilon="),
]
UNSUPPORTED = [
    ("opennmt", "opt", {"parallel_residual": True}, "parallel_residual: True, only False"),
    ("opennmt", "opt", {"sliding_window": 2}, "sliding_window: 2, only 0"),
    ("fairseq", "args", {"cross_self_attention": True}, "cross_self_attention: True, only"),
    (
        "fairseq",
        "args",
        {"encoder_normalize_before": False, "decoder_normalize_before": True},
        "decoder_normalize_before: True, only False",
    ),
]


def test_settings_of_checkpoints_are_checked():
    """Their types, and those that no tensor shows, but that change the model."""
    for settings, message in WRONG_TYPES:
        content = {"model": state_dict("opennmt"), "opt": settings}
        assert message in refusal("opennmt", content, num_heads=None)
    for family, part, settings, message in UNSUPPORTED:
        content = {"model": state_dict(family), part: settings}
        assert f"the model cannot have {message}" in refusal(family, content)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(number, tmp_path):
    state = state_dict("tunz")
    config, params = interop.load("tunz", state, **FAMILIES["tunz"].hints)
    name = next(name for name in state if name.endswith("layer1.weight"))
    state[name][0, 0] = number
    assert f"tensor {name} has numbers that are not finite" in refusal("tunz", state)
    params["decoder"]["final_norm"]["scale"] = np.full(16, number, np.float32)
    path = tmp_path / "own.safetensors"
    with pytest.raises(UserError, match=r"decoder/final_norm/scale has numbers that are not fin"):
        interop.save("tunz", config, params, path)
    own_format.write(path, TrainingState(config, params, None), "tunz")
    with pytest.raises(UserError, match=r"decoder/final_norm/scale has numbers that are not fin"):
        own_format.read(path, {})
