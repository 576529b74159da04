"""A family that a program registers is known to `load`, `convert` and `parity`."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from toy_references import ALL

import flaxformer_mt as fmt
from flaxformer_mt import interop, presets
from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.interop.formats import bundle, registration
from flaxformer_mt.parity import references
from flaxformer_mt.parity.references import t5

MINE = dataclasses.replace(interop.FAMILIES["t5"], name="mine", preset=presets.t5)
FOLDERS = dataclasses.replace(
    interop.HUB_FAMILIES["t5"], architectures={"mine": "MineForConditionalGeneration"}
)


OWN_SETTINGS = {"model_type": "mine", "architectures": ["MineForConditionalGeneration"]}


@pytest.fixture
def registered(monkeypatch):
    tables = (interop.FAMILIES, interop.HUB_FAMILIES, presets.FAMILIES, registration.REFERENCES)
    for table in (*tables, bundle.READERS, bundle.WRITERS):
        monkeypatch.setitem(table, "mine", None)
        del table["mine"]
    fmt.register_family(MINE, FOLDERS, reference=t5)


def test_its_folder_is_loaded_and_converted(registered, saved, tmp_path):
    shutil.copytree(saved("t5")[0], tmp_path / "mine")
    config = tmp_path / "mine" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | OWN_SETTINGS))
    model, expected = fmt.load(tmp_path / "mine"), fmt.load(saved("t5")[0])
    assert (model.family, model.config) == ("mine", expected.config)
    jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
    convert("mine", OWN, tmp_path / "mine", tmp_path / "run")
    convert(OWN, "mine", tmp_path / "run", tmp_path / "again")
    for path in (tmp_path / "mine").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_it_is_compared_by_its_name(registered, capsys):
    assert main(["parity", "--family", "mine"]) == 0
    assert "mine in float64" in capsys.readouterr().out


def test_without_a_reference_taps_are_needed(registered):
    fmt.register_family(MINE)
    with pytest.raises(UserError, match="mine has no reference with known taps"):
        references.build("mine")
    assert "mine" not in interop.HUB_FAMILIES


@pytest.mark.parametrize(
    ("family", "folders", "message"),
    [
        (interop.FAMILIES["t5"], None, "t5 is a built-in family or format"),
        (dataclasses.replace(MINE, name="ctranslate2"), None, "ctranslate2 is a built-in"),
        (dataclasses.replace(MINE, preset=None), None, "mine has no preset"),
        (MINE, interop.HUB_FAMILIES["t5"], "model_type=mt5 belongs to a built-in family"),
    ],
)
def test_names_of_built_in_families_are_refused(family, folders, message):
    with pytest.raises(UserError, match=message):
        fmt.register_family(family, folders)


def test_a_size_that_the_family_fixes_names_the_open_switches():
    closed = dataclasses.replace(MINE, open_switches=frozenset({"tie_embeddings", "scale_logits"}))
    state = ALL["t5"].build().state_dict()
    message = r"mine has relative_position_buckets=32, not 8; if it can, .*Family.open_switches"
    with pytest.raises(UserError, match=message):
        interop.load(closed, state, num_heads=4)
    with pytest.raises(UserError, match=r"t5 has norm_position=pre, not post$"):
        interop.load("t5", state, num_heads=4, norm_position="post")


def test_save_run_takes_what_load_returned(saved, tmp_path):
    tensors = saved("t5")[0] / "model.safetensors"
    config, params = interop.load("t5", tensors, num_heads=2, relative_position_max_distance=20)
    assert "carried" in params
    fmt.save_run(tmp_path / "run", config, fmt.load(saved("t5")[0]).tokenizers, params)
    found = fmt.Run(tmp_path / "run").model().params
    jax.tree.map(np.testing.assert_array_equal, found, interop.model_params(params))
