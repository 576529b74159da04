"""Comparison with values that another program saved: wrong settings are found and named."""

import functools
import io
import resource
import zipfile

import chex
import numpy as np
import pytest
import torch
import transformers
from toy_references import VARIANTS, Variant

from flaxformer_mt import interop
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.parity.families import check as families
from flaxformer_mt.parity.families import published
from flaxformer_mt.parity.families import saved_values as files
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.families.saved_values import script
from flaxformer_mt.parity.families.tokens import example
from flaxformer_mt.parity.trace.module_values import Tap, values_of_module

ONE_LAYER = {"num_encoder_layers": 1, "num_decoder_layers": 1}
MODELS = {"jadore801120": "jadore801120_prj_all", "opennmt": "opennmt_rotary"}
WRONG = {
    "jadore801120": [
        {"num_heads": 2}, {"pad_id": 3}, {"scale_embeddings": True}, {"scale_logits": False},
    ],
    "opennmt": [
        {"num_heads": 2}, {"position_kind": "alibi"}, {"position_layout": "concatenated"},
        {"norm_epsilon": 1e-5}, {"activation": "gelu"},
    ],
}  # fmt: skip
"""Wrong settings that the tensors of these checkpoints do not contradict."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns (checkpoint, inputs, outputs, right settings) of a family."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def make(family, **sizes):
        variant = VARIANTS[MODELS[family]]
        module = Variant(family, variant.sizes | ONE_LAYER | sizes).build()
        path, inputs, outputs = (
            folder / f"{family}{len(sizes)}{end}" for end in (".pt", "_in.npz", "_out.npz")
        )
        torch.save(module.state_dict(), path)
        hints = variant.hints | {name: sizes[name] for name in variant.hints.keys() & sizes}
        config, _ = interop.load(family, path, **hints)
        tokens = example(config, source_padding=recipe(family).source_padding)
        source, target = (torch.tensor(array).long() for array in tokens[:2])
        layers = {"encoder/layers/0": Tap(LAYERS[family])} if family in LAYERS else {}
        shape = (*tokens.source.shape, config.d_model)
        run = values_of_module(
            # As users do: tables stay rounded to float32.
            module.double(),
            layers,
            lambda module: module(source, target),
            {"encoder/layers/0": shape},
        )
        logits = run.output.detach().reshape(*target.shape, -1).numpy()
        np.savez(inputs, source=tokens.source, target_input=tokens.target_input)
        np.savez(outputs, **run.values, logits=logits)
        return path, inputs, outputs, hints

    return make


LAYERS = {"jadore801120": "encoder.layer_stack.0"}
"""Families of which an inner value is saved, too."""


@pytest.fixture
def command(saved, capsys):
    """Runs `flaxformer-mt parity` on the files of a family: (code, output, errors)."""

    def execute(family, settings, *options, with_values=True):
        path, inputs, outputs, hints = saved(family)
        given = [f"{name}={str(value).lower()}" for name, value in (hints | settings).items()]
        files = ("--inputs", inputs, "--logits", outputs) if with_values else ()
        arguments = ("--family", family, "--checkpoint", path, *files, *options, "--set", *given)
        code = main(["parity", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), captured.err

    return execute


def test_right_settings_agree_and_wrong_ones_have_exit_code_1(command):
    code, out, _ = command("jadore801120", {})
    assert code == 0, out
    assert "2 values compared, all agree" in out
    assert "which test the settings as well" in out
    assert "Our tables of positions are the published ones" in out
    code, out, _ = command("jadore801120", {"scale_embeddings": True})
    assert code == 1
    assert "2 differ" in out


@pytest.mark.slow
@pytest.mark.parametrize("family", WRONG)
def test_every_wrong_setting_has_exit_code_1(command, family):
    assert command(family, {}, "--tolerance", "*=1e-6")[0] == 0
    for settings in WRONG[family]:
        assert command(family, settings)[0] == 1


@pytest.mark.slow
def test_without_saved_values_the_report_says_what_it_rests_on(command):
    code, out, _ = command("jadore801120", {"scale_logits": False}, with_values=False)
    assert code == 0
    assert "built from the same settings as our model: wrong settings would agree." in out
    assert "given: num_heads=4, scale_embeddings=False, scale_logits=False; read from its" in out
    assert "Published tables of positions are replaced by exact ones on both sides." in out


def test_a_checkpoint_that_contradicts_a_setting_is_believed():
    module = Variant("jadore801120", ONE_LAYER | {"source_vocab_size": 11}).build()
    stated = {"settings": {"n_head": 4, "src_pad_idx": 0}, "model": module.state_dict()}
    model = published.PublishedModel(
        interop.FAMILIES["jadore801120"], "x.pt", {}, interop.checkpoint_files.read(stated), None
    )
    found = families._contradicted(model.stated(), {"num_heads": 2, "pad_id": 0})
    assert [str(each) for each in found] == [
        "num_heads is 2 here, but 4 in the checkpoint's own settings"
    ]


@pytest.mark.slow
def test_tables_are_exact_on_request(command):
    code, out, _ = command("jadore801120", {}, "--tables", "exact")
    assert code == 1  # The program that saved the values had tables that were rounded to float32.
    assert "published ones" not in out
    assert "values 2.2e-08" in out


@pytest.mark.slow
def test_the_printed_script_saves_what_the_command_compares(saved, capsys, monkeypatch, tmp_path):
    path, _, _, hints = saved("jadore801120")
    heads = ("--set", f"num_heads={hints['num_heads']}")
    checkpoint = ("parity", "--family", "jadore801120", "--checkpoint", str(path))
    assert main([*checkpoint, "--script", *heads]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 25
    model = published.read("jadore801120", path)
    module = model.reference(model.configure({"num_heads": 4}), "float32", "exact")
    monkeypatch.chdir(tmp_path)
    exec(text.replace("module = ...", "module = given"), {"given": module})
    values = ("--inputs", "batch.npz", "--logits", "saved.npz")
    assert main([*checkpoint, *values, *heads]) == 0
    assert "all agree" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_calls_models_of_transformers_by_keywords(tmp_path, monkeypatch):
    settings = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 20}
    for stack in ("encoder", "decoder"):
        settings |= {f"{stack}_attention_heads": 2, f"{stack}_ffn_dim": 8}
    module = transformers.MarianMTModel(
        transformers.MarianConfig(**settings, pad_token_id=19, max_position_embeddings=16)
    )
    config, _ = interop.load("marian", module.state_dict(), num_heads=2, pad_id=19, bos_id=19)
    monkeypatch.chdir(tmp_path)
    text = script("marian", config)
    exec(text.replace("module = ...", "module = given"), {"given": module})
    batch, found = np.load("batch.npz"), np.load("saved.npz")
    assert found["logits"].shape == (*batch["target_input"].shape, 20)


def claiming(shape, dtype="<f8"):
    """An .npy file without values."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header


def archived(content, compression=zipfile.ZIP_DEFLATED, flags=0):
    """An .npz file of one member; `flags` are those of its entry."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("logits.npy", content)
    packed = bytearray(file.getvalue())
    packed[packed.index(b"PK\1\2") + 8] |= flags
    return bytes(packed)


BOMBS = {
    "a shape": claiming((10**6, 10**6)),
    "a negative shape": claiming((-1, -1)),
    "no values": claiming((10**30, 0)),
    "a wide value": claiming((1,), "V2000000000"),
    "a deep header": b"\x93NUMPY\1\0\x10\x27" + b"(" * 10_000,
    "a header of signs": b"\x93NUMPY\1\0\x10\x27" + b"-" * 9_999 + b"1",
    "zeros": archived(bytes(30_000_000)),
    "zeros in bzip2": archived(bytes(30_000_000), zipfile.ZIP_BZIP2),
    "encrypted": archived(claiming((0,)), flags=1),
    "patched": archived(claiming((0,)), flags=0x20),
    "a claim in an archive": archived(claiming((10**6, 10**6))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_array_that_asks_for_more_than_its_file_has_is_refused(tmp_path, name):
    (tmp_path / "values").write_bytes(BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="damaged") as error:
        files.read(tmp_path / "values", tmp_path / "values")
    assert "\n" not in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000


def test_damaged_files_and_other_models_are_refused(saved, tmp_path):
    path, inputs, outputs, hints = saved("jadore801120")
    config = published.read("jadore801120", path).configure(hints)
    for name, content in {"empty.npz": b"", "text.npz": b"no zip", "zip.npz": b"PK\3\4..."}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: damaged, or not an .npz file"):
            files.read(tmp_path / name, outputs)
    with pytest.raises(UserError, match=r"batch\.npz: there is no such file"):
        files.read(tmp_path / "batch.npz", outputs)
    with pytest.raises(UserError, match="has no array source, only encoder/layers/0, logits"):
        files.read(outputs, outputs)
    with pytest.raises(UserError, match="has no array of values, such as logits"):
        files.read(inputs, inputs)
    np.savez(tmp_path / "objects.npz", source=np.array([None]))
    with pytest.raises(UserError, match="an array of Python objects"):
        files.read(tmp_path / "objects.npz", outputs)
    both = dict(np.load(inputs)) | dict(np.load(outputs))
    np.savez(tmp_path / "both.npz", **both)
    values = files.read(inputs, outputs)
    for pair in (("both.npz",) * 2, ("both.npz", outputs), (inputs, "both.npz")):
        chex.assert_trees_all_equal(files.read(*(tmp_path / name for name in pair)), values)
    with pytest.raises(UserError, match="there is no site enc: name saved values logits, or sourc"):
        files.check_sites({"enc": np.zeros(1)}, config)
    large = values._replace(inputs=values.inputs | {"source": values.inputs["source"] + 90})
    with pytest.raises(UserError, match=r"source has tokens from 90 to .* the vocabulary has 11"):
        large.tokens(config)
