"""The programs in `examples/`, with tiny models."""

import dataclasses
import importlib
import io
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt import Run
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.interop.convert import OWN, convert


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs a program in this process, in a folder of its own, and returns what it prints."""

    def execute(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(f"examples.{name}").main()
        return capsys.readouterr().out

    return execute


@pytest.fixture
def file(tmp_path):
    """A file of two columns."""
    pairs = load_corpus(DataConfig(corpus="phrases", generated_pairs=200), "train")
    lines = map("\t".join, zip(pairs.sources, pairs.targets, strict=True))
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    return "pairs.tsv"


TINY = ("--steps", 1, "--batch-tokens", 128, "--beam-size", 1, "--devices", 1)


@pytest.mark.slow
def test_train_on_your_file(example, file):
    size = ("--width", 8, "--vocabulary", 400, "--hold-out", 20)
    out = example("train_on_your_file", file, "--workdir", "run", *TINY, *size)
    assert "CheckpointScore(step=1, metric='bleu', value=" in out
    assert out.count(" -> ") == 5
    run = Run("run")
    assert "<figure>" in (run.folder / "curves.html").read_text()
    assert run.config.data.columns == ("1", "2")


@pytest.mark.slow
def test_an_opus_mt_model(example, file, trained_run, tmp_path):
    convert(OWN, "marian", trained_run, tmp_path / "opus")
    options = ("--workdir", "tuned", "--hold-out", 20, "--sentence", "seven kilometers", *TINY)
    assert "Run('tuned')" in example("opus_mt", "opus", file, *options)
    assert Run("tuned").config.train.init_from == "tuned-start"


@pytest.mark.slow
def test_an_attention_of_your_own(example, tmp_path):
    size = ("--width", 8, "--pairs", 60, "--kinds", "cosine")
    out = example("own_attention", "--workdir", "runs", *size, *TINY)
    assert "translate with: flaxformer-mt translate --run runs/cosine" in out
    params = Run("runs/cosine").model().params
    assert params["encoder"]["layers"]["self_attention"]["temperature"].shape == (2, 4)
    assert (tmp_path / "runs/curves.png").exists()


SCRIPTS = Path(__file__).parent.parent / "examples"


@pytest.fixture
def script(monkeypatch, tmp_path, capsys):
    """Runs a training script in a folder of its own, and returns what it prints."""

    def execute(name, *arguments, smaller=()):
        path = SCRIPTS / f"{name}.py"
        text = path.read_text()
        assert len(text.splitlines()) <= 65
        for old, new in smaller:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        with jax.numpy_dtype_promotion("standard"):  # JAX's default, which optax needs.
            exec(compile(text, path, "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return execute


def logits_of(run, pairs):
    """Logits of a saved model, float32, of pairs."""
    model = fmt.load(run)
    batch = fmt.padded(pairs, model.tokenizers, model.config.model, length=32)
    return np.asarray(fmt.apply(model.config.model, model.params, batch))


PAIRS = [("two birds", "deux oiseaux"), ("one kilometer", "un kilomètre")]


@pytest.mark.slow
def test_the_plain_script_writes_a_run(script, file, tmp_path):
    layers = "num_encoder_layers=1, num_decoder_layers=1,"
    script(
        "plain_script",
        file,
        2,
        smaller=[
            ("size=8000", "size=420"),
            ("d_model=256, num_heads=4, d_ff=1024,", f"d_model=16, num_heads=2, d_ff=32, {layers}"),
            ("rows=256, length=64", "rows=8, length=32"),
        ],
    )
    translator = fmt.Translator.from_run(tmp_path / "runs/mine-final")
    assert isinstance(translator.translate("three days"), str)


@pytest.mark.slow
def test_a_student_learns_from_a_teacher(script, file, trained_run):
    out = script("distillation", trained_run, file, 12)
    last = json.loads(out.splitlines()[-1].split(" ", 1)[1].replace("'", '"'))
    assert last.keys() == {"loss", "accuracy", "distillation", "flops_per_target_token"}
    assert fmt.load("runs/student").config.model.num_decoder_layers == 1
    assert 0 < last["distillation"] < 20


@pytest.mark.slow
def test_preferred_translations_become_more_probable(script, trained_run, tmp_path):
    lines = [
        {"source": source, "chosen": target, "rejected": "un deux trois"}
        for source, target in PAIRS * 4
    ]
    (tmp_path / "preferences.jsonl").write_text("\n".join(map(json.dumps, lines)))
    steps = script("preferences", trained_run, "preferences.jsonl", 6).splitlines()
    metrics = [json.loads(line.split(" ", 1)[1].replace("'", '"')) for line in steps]
    assert metrics[0]["loss"] == pytest.approx(np.log(2), abs=0.05)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["preferred"] == 1


@pytest.mark.slow
def test_the_expected_risk_of_samples_is_trained(script, file, trained_run):
    out = script("minimum_risk", trained_run, file, 3)
    risks = [float(line.split()[-1]) for line in out.splitlines()]
    assert len(risks) == 3
    assert all(0 <= risk <= 1 for risk in risks)


@pytest.mark.slow
def test_adapters_are_saved_alone_and_merged_for_export(script, file, trained_run, tmp_path):
    convert(OWN, "marian", trained_run, tmp_path / "base")
    script("lora", "base", file, 10, smaller=[("% 100 == 0", "% 10 == 0")])
    with fmt.Checkpoints("runs/adapters") as checkpoints:
        assert checkpoints.latest_step() == 10
    names = {path.name for path in Path("runs/adapters/checkpoints/10").iterdir()}
    assert "params" not in names  # Adapters, their moments and the step.
    merged, exported = logits_of("runs/merged", PAIRS), logits_of("runs/adapter", PAIRS)
    np.testing.assert_allclose(exported, merged, atol=1e-5)
    assert np.abs(merged - logits_of(trained_run, PAIRS)).max() > 1e-3


@pytest.mark.slow
def test_proposals_of_a_small_model_change_no_translation(
    script, trained_run, tmp_path, monkeypatch
):
    """With a small model that knows nothing, and with one that proposes what the large one says."""
    model = fmt.load(trained_run)
    small = dataclasses.replace(model.config.model, num_decoder_layers=1, d_ff=16)
    small = model.tokenizers.with_sizes(small)
    params = jax.jit(fmt.init, static_argnums=0)(small, jax.random.key(0))
    monkeypatch.chdir(tmp_path)
    fmt.save_run("draft", small, model.tokenizers, params)
    sentences = [source for source, _ in PAIRS] + ["three days and two hours", "2 kilometers"]
    expected = model.translate(sentences, beam_size=1)
    for draft, fewer in (("draft", False), (trained_run, True)):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(sentences)))
        greedy, *found = script("speculative_decoding", trained_run, draft).splitlines()
        plain, heading, proposed = found[:4], found[4], found[5:]
        assert plain == proposed == expected
        steps = [int(line.split()[2]) for line in (greedy, heading)]
        assert steps[1] < steps[0] / 3 if fewer else steps[1] <= steps[0]
