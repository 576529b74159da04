"""The subcommand `parity`: families with random weights, checkpoints in files, refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_report import agreeing, diagnosed, refuse_constant, training
from toy_references import VARIANTS

from flaxformer_mt.cli import main
from flaxformer_mt.parity.driver import GRADIENTS, VALUES
from flaxformer_mt.parity.families import published
from flaxformer_mt.parity.families.check import random_reference
from flaxformer_mt.parity.reports import family_summary
from flaxformer_mt.parity.reports.family_summary import (
    FamilyReports,
    FamilySummary,
)
from flaxformer_mt.parity.trajectories import TOLERANCES
from flaxformer_mt.presets import FAMILIES

# One small model for all comparisons, so that it is compiled once.
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}
SET = ("--set", *(f"{name}={value}" for name, value in LAYERS.items()))
NUM_HEADS = 4
DOCS = Path(__file__).parents[2] / "docs" / "parity.md"


@pytest.fixture
def command(capfd):
    """Runs `flaxformer-mt parity`: (exit code, standard output, standard error)."""

    def execute(*arguments):
        code = main(["parity", *map(str, arguments)])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return execute


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A file with the weights of a `tunz`, and its state dict."""
    path = tmp_path_factory.mktemp("checkpoints") / "tunz.pt"
    _, module = random_reference("tunz", "float32", "toy", 3, **LAYERS)
    torch.save(module.state_dict(), path)
    return path


@pytest.mark.slow
def test_a_family_agrees_and_its_reports_are_written(command, tmp_path):
    json_file, html = tmp_path / "report.json", tmp_path / "report.html"
    code, out, err = command(
        "--family", "tunz", *SET, "--steps", 4, "--json", json_file, "--html", html
    )
    assert (code, err) == (0, "")
    assert out.startswith("tunz in float64: ")
    assert "all agree" in out
    values = json.loads(json_file.read_text(), parse_constant=refuse_constant)
    assert values["passed"]
    assert len(values["trajectory"]["ours"]["loss"]) == 4
    assert "<svg" in html.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.html"}


def test_a_former_family_name_reports_the_current_one(command, tmp_path):
    json_file = tmp_path / "report.json"
    code, out, _ = command("--family", "questions", *SET, "--json", json_file)
    assert code == 0
    assert out.startswith("annotated_wide_heads in float64: ")
    assert json.loads(json_file.read_text())["family"] == "annotated_wide_heads"


@pytest.mark.slow
def test_a_checkpoint_agrees_in_either_dtype(command, checkpoint):
    settings = ("--family", "tunz", "--checkpoint", checkpoint, "--set", f"num_heads={NUM_HEADS}")
    code, out, _ = command(*settings, "--verbose")
    assert code == 0
    assert "encoder/layers/0/self_attention/query " in out
    code, out, _ = command(*settings, "--dtype", "float32")
    assert code == 0
    assert out.startswith("tunz in float32: ")


def test_a_weight_that_is_not_finite_is_refused_by_name(command, checkpoint, tmp_path):
    state = torch.load(checkpoint)
    state["decoder.layers.0.ffn.layer1.weight"][0, 0] = torch.nan
    torch.save(state, tmp_path / "damaged.pt")
    arguments = ("--family", "tunz", "--checkpoint", tmp_path / "damaged.pt")
    code, out, err = command(*arguments, "--set", f"num_heads={NUM_HEADS}")
    assert (code, out) == (2, "")
    assert "decoder.layers.0.ffn.layer1.weight has numbers that are not finite" in err


def test_options_of_a_reference_follow_from_the_checkpoint(tmp_path):
    module = VARIANTS["annotated_1000_shared"].build()
    torch.save(module.state_dict(), tmp_path / "shared.pt")
    model = published.read("annotated", tmp_path / "shared.pt")
    config = model.configure({"num_heads": NUM_HEADS})
    loaded = model.reference(config, "float32", "exact")
    assert (config.d_model, config.num_decoder_layers) == (16, 2)
    tokens = torch.arange(3, 9)[None]
    assert torch.equal(loaded(tokens, tokens), module(tokens, tokens))


def test_tables_are_computed_in_the_dtype_of_the_comparison(tmp_path):
    torch.save(VARIANTS["annotated_1000"].build().state_dict(), tmp_path / "model.pt")
    model = published.read("annotated", tmp_path / "model.pt")
    loaded = model.reference(model.configure({"num_heads": NUM_HEADS}), "float64", "exact")
    exact = VARIANTS["annotated_1000"].build("float64")
    state, expected = loaded.state_dict(), exact.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float64}
    assert torch.equal(state["src_embed.1.pe"], expected["src_embed.1.pe"])
    weight = "src_embed.0.lut.weight"
    assert torch.equal(state[weight], state[weight].float().double())


def make_summary(**reports):
    values = {"wide": training(differs=False), "narrow": agreeing} | reports
    return FamilySummary((FamilyReports(values["wide"], values["narrow"]),), 3)


def test_the_table_of_all_families(command, tmp_path, monkeypatch):
    calls = []

    def check_all(**options):
        calls.append(options)
        return make_summary()

    monkeypatch.setattr(family_summary, "check_all", check_all)
    json_file = tmp_path / "all.json"
    code, out, _ = command("--family", "all", "--json", json_file, *SET)
    assert code == 0
    assert calls[0]["num_steps"] == 100
    assert {name: calls[0][name] for name in LAYERS} == LAYERS
    rows = [line.split() for line in out.splitlines()]
    assert ["annotated", "2.0e-16", "6.0e-17", "-", "4.0e-16", "6.0e-17"] in rows
    differences = json.loads(json_file.read_text(), parse_constant=refuse_constant)
    assert differences["families"][0]["values"] == 2e-16


def test_the_table_shows_the_reports_that_failed(command, monkeypatch):
    monkeypatch.setattr(
        family_summary, "check_all", lambda **options: make_summary(narrow=diagnosed)
    )
    code, out, _ = command("--family", "all")
    assert code == 1
    assert "Likely cause: mask sign;" in out
    assert "DIFFERS FIRST" in out


@pytest.mark.slow
def test_a_summary_has_both_dtypes():
    announced = []
    result = family_summary.check_all(["tunz"], announce=announced.append, **LAYERS)
    assert announced == ["tunz in float64", "tunz in float32"]
    assert result.passed
    (reports,) = result.reports
    assert (reports.float64.dtype, reports.float32.dtype) == ("float64", "float32")
    assert reports.differences["steps"] is None


def test_what_cannot_be_used_is_refused_in_one_line(command, checkpoint, tmp_path):
    state = torch.load(checkpoint)
    del state["decoder.layers.0.ffn.layer1.weight"]
    torch.save(state, tmp_path / "incomplete.pt")
    plain = tmp_path / "plain.md"
    plain.write_text("# Parity\n")
    one = ("--family", "tunz")
    incomplete = ("--checkpoint", tmp_path / "incomplete.pt", "--set", "num_heads=4")
    no_folder = plain / "report.json"
    refusals = {
        (*one, *incomplete): "tensor decoder.layers.0.ffn.layer1.weight is missing",
        (*one, "--checkpoint", checkpoint): "give num_heads",
        (*one, "--checkpoint", tmp_path / "no.pt"): "no.pt",
        (*one, "--set", "heads=8"): "unknown model option 'heads'",
        (*one, "--set", "num_heads=many"): "--set num_heads=many: num_heads is a number, int",
        (*one, "--set", "norm_position=mid"): "norm_position is one of post, pre",
        (*one, "--set", "qkv_bias"): "qkv_bias is one of true, false",
        (*one, "--set", "scan_layers=maybe"): "scan_layers is one of auto, true, false",
        (*one, "--set", "dtype=bfloat16"): "--set dtype: both sides compute in the same dtype",
        (*one, "--set", "qkv_bias=true"): "tunz has qkv_bias=False",
        (*one, "--steps", -1): "--steps=-1: must be at least 0",
        (*one, "--json", no_folder): f"{plain} is not a folder",
        (
            "--family",
            "tunz",
            "--checkpoint",
            plain,
            "--size",
            "base",
        ): "--size is for random",
        ("--family", "all", "--html", plain): "--html is for a single family only: leave it out",
    }
    for arguments, message in refusals.items():
        code, out, err = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("flaxformer-mt: error: ")
        assert err.count("\n") == 1
        assert message in err
    assert plain.read_text() == "# Parity\n"


def test_unknown_options_and_families_have_a_code_of_their_own(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["parity", "--famly", "tunz"])
    assert exit_info.value.code == 2
    assert "--family" in capsys.readouterr().err
    assert main(["parity", "--family", "tun"]) == 2
    assert "tun" in capsys.readouterr().err


def test_help_names_every_family_and_waits_for_nothing():
    code = (
        "import sys, flaxformer_mt.cli as cli\n"
        "try: cli.main(['parity', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'torch'} & sys.modules.keys()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    for family in (*FAMILIES, "all"):
        assert family in result.stdout
    assert "flaxformer-mt parity --family torch --checkpoint" in result.stdout


def test_the_table_in_the_docs_has_every_family_within_tolerance():
    text = DOCS.read_text(encoding="utf-8")
    table = text[text.index("| family |") :].split("\n\n")[0]
    heads, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert heads == list(FamilySummary((), 100).headings)
    assert [family for family, *_ in rows] == list(FAMILIES)
    bounds = (
        VALUES["float64"], GRADIENTS["float64"], TOLERANCES["float64"], VALUES["float32"],
        GRADIENTS["float32"],
    )  # fmt: skip
    for _, *differences in rows:
        assert (np.array(differences, float) <= bounds).all()


@pytest.mark.slow
def test_the_examples_in_the_docs_run(capsys, monkeypatch, tmp_path):
    """Those that need nothing but this repository: the ten lines, and the trajectory."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    own = [block for block in blocks if "references.build(" in block]
    steps = [block for block in blocks if "parity.trajectory(" in block]
    assert len(own) == len(steps) == 1
    monkeypatch.chdir(tmp_path)
    dtype = torch.get_default_dtype()
    try:
        exec("".join(own + steps), {})
    finally:
        torch.set_default_dtype(dtype)
    out = capsys.readouterr().out
    assert "all agree" in out
    assert out.endswith("\nNone\n")
    assert (tmp_path / "steps.png").exists()
