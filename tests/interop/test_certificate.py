"""Every export has a certificate of what it computes, which can be checked anywhere."""

import json
import re
import shutil

import hub_models
import numpy as np
import pytest
import safetensors.numpy

from flaxformer_mt.cli import main
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop import certificate
from flaxformer_mt.interop.convert import OWN, convert

FORMATS = {
    "marian": "marian",
    "ctranslate2": "ctranslate2",
    "jax": "jax",
    "safetensors": "marian",
    "pt": "marian",
}
"""By name: the family."""


class Exports(dict):
    """One run in several formats, by name; each is written when it is first asked for."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder

    def __missing__(self, name):
        family = FORMATS[name]
        self[name] = self.folder / (name if name == family else f"model.{name}")
        convert(OWN, family, self.run, self[name])
        return self[name]


@pytest.fixture(scope="module")
def exports(trained_run, tmp_path_factory):
    return Exports(trained_run, tmp_path_factory.mktemp("exports"))


@pytest.fixture
def export(request, exports, tmp_path):
    """A copy of an export."""
    source = exports[request.param]
    copy = tmp_path / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    if not source.is_dir():
        shutil.copy(certificate.path_of(source), certificate.path_of(copy))
    return copy


every_format = pytest.mark.parametrize(
    "export",
    [
        pytest.param(name, marks=[] if name in ("ctranslate2", "safetensors") else pytest.mark.slow)
        for name in FORMATS
    ],
    indirect=True,
)


@every_format
def test_an_export_is_verified_where_its_source_is_not(export, capsys):
    assert main(["parity", "--verify", str(export)]) == 0
    assert "computes the log-probabilities of" in capsys.readouterr().out
    content = json.loads(certificate.path_of(export).read_text())
    assert content["sites"][0]["site"] == "log_probabilities"
    assert content["sites"][0]["relative"] < certificate.TOLERANCE
    assert content["versions"].keys() >= {"flaxformer_mt", "jax", "numpy"}


@every_format
def test_a_changed_file_is_named(export, capsys):
    content = json.loads(certificate.path_of(export).read_text())
    name = max(content["files"], key=lambda name: content["files"][name]["bytes"])
    path = export / name if export.is_dir() else export
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert main(["parity", "--verify", str(export)]) == 1
    assert f"{name} differs from its manifest" in capsys.readouterr().out


def test_other_weights_with_hashes_that_fit_are_found(exports, tmp_path, capsys):
    """As if an export had been written wrongly: only what it computes tells."""
    source = exports["safetensors"]
    tensors = safetensors.numpy.load_file(source)
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    copy = tmp_path / source.name
    safetensors.numpy.save_file(tensors | {name: np.flip(tensors[name]).copy()}, copy)
    content = json.loads(certificate.path_of(source).read_text())
    content["files"] = certificate.manifest.entries(copy)
    certificate.path_of(copy).write_text(json.dumps(content))
    assert main(["parity", "--verify", str(copy)]) == 1
    assert "differ by more than when it was written" in capsys.readouterr().out


def test_quantized_weights_are_told(trained_run, tmp_path, capsys):
    target = tmp_path / "int8"
    options = ["--from", OWN, "--to", "ctranslate2", "--quantization", "int8"]
    assert main(["convert", *options, str(trained_run), str(target)]) in (0, None)
    assert "log-probabilities differ by up to" in capsys.readouterr().err
    assert main(["parity", "--verify", str(target)]) == 0


def test_without_certificate(trained_run, tmp_path, capsys):
    target = tmp_path / "export"
    options = ["--from", OWN, "--to", "ctranslate2", "--no-certificate"]
    assert main(["convert", *options, str(trained_run), str(target)]) in (0, None)
    assert not (target / "parity.json").exists()
    assert main(["parity", "--verify", str(target)]) == 2
    assert "parity.json is missing: convert writes it" in capsys.readouterr().err
    assert main(["parity"]) == 2
    assert "give --family, the published model, or --verify" in capsys.readouterr().err


@pytest.mark.slow_except(
    "changes0", "changes1", "changes2", "changes4", "changes5", "changes6", "changes7"
)
@pytest.mark.parametrize(
    "changes",
    [
        {"family": "no family"},
        {"settings": {"no_field": 3}},
        {"settings": 3},
        {"tokens": {key: [[1, 2]] for key in ("source", "target_input", "target_output")}},
        {"tokens": dict.fromkeys(("source", "target_input", "target_output"), 3)},
        {"log_probabilities": [[1.0]]},
        {"source": []},
        {"sites": []},
    ],
)
def test_a_certificate_of_something_else(exports, tmp_path, changes, capsys):
    copy = tmp_path / exports["safetensors"].name
    shutil.copy(exports["safetensors"], copy)
    content = json.loads(certificate.path_of(exports["safetensors"]).read_text())
    certificate.path_of(copy).write_text(json.dumps(content | changes))
    code = main(["parity", "--verify", str(copy)])
    text = "".join(capsys.readouterr())
    assert (code, text.count("\n")) in ((2, 1), (1, 2)), text
    assert "Traceback" not in text


ENTRY = {"bytes": 1, "sha256": "0"}
CERTIFICATE = {
    "family": "marian",
    "source": {"name": "run", "parameters_sha256": "0"},
    "files": {"model.safetensors": ENTRY},
    "settings": {},
    "tokens": {"source": [[1]], "target_input": [[1]], "target_output": [[1]]},
    "log_probabilities": [[-1.0]],
    "sites": [{"relative": 0.0}],
}
DEEP = json.loads("[" * 1000 + "]" * 1000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": 3}, "family: expected a string"),
        ({"source": {"name": None, "parameters_sha256": ""}}, "source.name: expected a string"),
        ({"files": []}, "files: expected an object"),
        ({"files": {}}, "files: expected an object of length >= 1"),
        ({"files": {"a": ENTRY | {"bytes": "1"}}}, "files[...].bytes: expected an integer"),
        ({"files": {"a": ENTRY | {"bytes": True}}}, "files[...].bytes: expected an integer"),
        ({"files": {"a": ENTRY | {"bytes": -1}}}, "files[...].bytes: expected an integer >= 0"),
        ({"files": {"a": ENTRY | {"bytes": 10**30}}}, "files[...].bytes: expected an integer <="),
        ({"settings": [1]}, "settings: expected an object"),
        ({"settings": {"num_heads": DEEP}}, "nested too deeply"),
        ({"tokens": {}}, "tokens: there is no field source"),
        ({"tokens": CERTIFICATE["tokens"] | {"source": []}}, "tokens.source: expected a list of"),
        ({"tokens": CERTIFICATE["tokens"] | {"source": [[1.5]]}}, "tokens.source[0][0]: expected"),
        ({"log_probabilities": [[float("nan")]]}, "[0][0]: expected a number that is finite"),
        ({"log_probabilities": [[float("inf")]]}, "[0][0]: expected a number that is finite"),
        ({"sites": []}, "sites: expected a list of length >= 1"),
        ({"sites": [{"relative": "0"}]}, "sites[0].relative: expected a number"),
    ],
)
def test_a_damaged_certificate_names_the_member(tmp_path, changes, reason):
    path = tmp_path / "parity.json"
    path.write_text(json.dumps(CERTIFICATE | changes))
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        certificate.verify(tmp_path)
    assert str(caught.value).startswith(f"{path} is damaged: ")


def test_the_limit_of_the_tolerance_is_not_in_the_certificate(exports, tmp_path, capsys):
    copy = tmp_path / exports["safetensors"].name
    shutil.copy(exports["safetensors"], copy)
    content = json.loads(certificate.path_of(exports["safetensors"]).read_text())
    content["log_probabilities"][0][0] *= 1.5
    content["sites"][0]["relative"] = 1.0
    certificate.path_of(copy).write_text(json.dumps(content))
    assert main(["parity", "--verify", str(copy)]) == 1
    assert "the tolerance is 1.0e-04" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nllb", "t5"])
def test_what_an_export_bans_is_banned_in_the_comparison(kind, saved, tmp_path):
    """Models whose padding is probable, and sentences of 1 to 200 tokens."""
    target = tmp_path / "served"
    notes = convert(hub_models.family_of(kind), "ctranslate2", saved(kind)[0], target)
    assert not [note for note in notes if "differ by up to" in note]
    content = json.loads((target / "parity.json").read_text())
    assert content["sites"][0]["relative"] <= 1e-4
    lengths = [len(row) - 1 for row in content["tokens"]["source"]]
    assert (min(lengths), max(lengths)) == (1, 200)
    assert [*map(len, content["log_probabilities"])] == [length + 1 for length in lengths]
    assert not certificate.verify(target).problems
