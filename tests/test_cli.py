"""The console script: what it prints, and how it refuses."""

import io
import json
import os
import subprocess
import sys
import types

import jax
import numpy as np
import optax
import pytest
from talker import make_talker, random_params, sentences

from flaxformer_mt.cli import main
from flaxformer_mt.config import to_json
from flaxformer_mt.decoding.run import load_run
from flaxformer_mt.decoding.scoring import score_pairs
from flaxformer_mt.decoding.translator import Translator
from flaxformer_mt.evaluation import evaluate
from flaxformer_mt.training.checkpoint import Checkpointer
from flaxformer_mt.training.state import TrainState

LINES = [*sentences(3), "", *sentences(2, seed=7)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder whose best checkpoint is not the last."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    talker = make_talker()
    with Checkpointer(folder, keep_last=2) as checkpointer:
        for step, loss in ((1, 1.0), (2, 2.0)):
            params = random_params(talker.model, seed=step)
            state = TrainState(
                step=np.int32(step),
                params=params,
                opt_state=optax.sgd(0.1, momentum=0.9).init(params),
                key=jax.random.key_data(jax.random.key(0)),
            )
            checkpointer.save(step, state, figures={"loss": loss})
    talker.tokenizers.save(folder / "tokenizer")
    (folder / "data.json").write_text('{"train": "0123"}')
    (folder / "config.json").write_text(to_json(talker.config))
    return folder


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the console script: (exit code, standard output, standard error)."""

    def execute(*arguments, stdin=b""):
        stream = types.SimpleNamespace(buffer=io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", stream)
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return execute


def write(path, lines):
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def test_translate_keeps_the_lines(run, command):
    expected = Translator.from_run(run).translate(LINES)
    assert expected[3] == ""
    for text in ("\n".join(LINES) + "\n", "\n".join(LINES), "\r\n".join(LINES) + "\r\n"):
        code, out, err = command("translate", "--run", run, stdin=text.encode())
        assert (code, err) == (0, "")
        assert out.split("\n") == [*expected, ""]
    assert command("translate", "--run", run, stdin=b"") == (0, "", "")


def test_translate_takes_search_options_and_checkpoints(run, command):
    _, out, _ = command(
        "translate", "--run", run, "--checkpoint", "2", "--beam-size", "2",
        "--length-penalty", "0", "--n-best", "2", stdin="\n".join(LINES).encode(),
    )  # fmt: skip
    expected = Translator.from_run(run, 2).translate_n_best(LINES, 2, 2, 0.0)
    assert out.splitlines() == [
        f"{index} ||| {hypothesis.text} ||| {hypothesis.score:.6f}"
        for index, hypotheses in enumerate(expected)
        for hypothesis in hypotheses
    ]


def test_score_prints_one_log_probability_a_line(run, command, tmp_path):
    sources, targets = sentences(4), sentences(4, seed=5)
    code, out, _ = command(
        "score", "--run", run, "--checkpoint", "last",
        "--source", write(tmp_path / "source", sources),
        "--target", write(tmp_path / "target", targets),
    )  # fmt: skip
    model = load_run(run, "last")
    scores = score_pairs(model.config, model.params, model.tokenizers, sources, targets)
    assert code == 0
    assert [float(line) for line in out.splitlines()] == pytest.approx(
        [score.log_probability for score in scores], abs=1e-6
    )


def test_evaluate_prints_json(run, command, tmp_path):
    sources, references = sentences(4), sentences(4, seed=5)
    code, out, _ = command(
        "evaluate", "--run", run,
        "--source", write(tmp_path / "source", sources),
        "--reference", write(tmp_path / "reference", references),
    )  # fmt: skip
    figures = evaluate(Translator.from_run(run).translate(sources), references)
    assert code == 0
    assert json.loads(out) == {"step": 1, "sentences": 4, **figures}


def test_inspect_tells_models_apart(run, command):
    talker = make_talker()
    _, out, _ = command("inspect", "--run", run, "--json")
    last = json.loads(out)
    leaves = jax.tree.leaves(random_params(talker.model))
    fingerprint = talker.tokenizers.source.fingerprint
    assert last["step"] == 2
    assert last["parameter_count"] == sum(leaf.size for leaf in leaves)
    assert last["tokenizer_fingerprints"] == {"source": fingerprint, "target": fingerprint}
    assert last["data_fingerprints"] == {"train": "0123"}
    assert last["config"] == json.loads(to_json(talker.config))
    best = json.loads(command("inspect", "--run", run, "--checkpoint", "best", "--json")[1])
    assert best["step"] == 1
    assert best["parameters_sha256"] != last["parameters_sha256"]
    lines = command("inspect", "--run", run)[1].splitlines()
    assert lines[0] == "step: 2"
    assert f"parameters_sha256: {last['parameters_sha256']}" in lines
    assert "config.decode.beam_size: 3" in lines


def test_options_that_do_not_exist_are_refused_with_the_right_one(run, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["translate", "--run", str(run), "--beem-size", "4"])
    assert exit_info.value.code == 2
    assert "--beam-size" in capsys.readouterr().err


def without(run, folder, *missing):
    """A copy of the run folder (by links) in which something is missing."""
    folder.mkdir()
    for path in run.iterdir():
        if path.name not in missing:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "is no run folder: it has no config.json"),
        ("tokenizer", "is missing"),
        ("checkpoints", "holds no checkpoint"),
    ],
)
def test_run_folders_with_something_missing_are_refused(run, command, tmp_path, missing, message):
    folder = without(run, tmp_path / "run", missing)
    assert_refused(command("inspect", "--run", folder), str(folder), message)


def test_what_cannot_be_used_is_refused_in_one_line(run, command, tmp_path):
    two, three = write(tmp_path / "two", "ab"), write(tmp_path / "three", "abc")
    assert_refused(command("inspect", "--run", tmp_path / "no"), "there is no run folder", "no")
    assert_refused(command("inspect", "--run", run, "--checkpoint", "7"), "step 7", "1, 2")
    assert_refused(
        command("score", "--run", run, "--source", two, "--target", three),
        f"{two} has 2 lines but {three} has 3",
    )
    assert_refused(
        command("evaluate", "--run", run, "--source", tmp_path / "no", "--reference", two),
        f"there is no file {tmp_path / 'no'}",
    )
    assert_refused(
        command("translate", "--run", run, stdin=b"good\nbad \xff\n"), "standard input, line 2"
    )
    assert_refused(
        command("translate", "--run", run, "--n-best", "9"),
        "decode.n_best=9 is more than decode.beam_size=3",
    )
    damaged = without(run, tmp_path / "damaged", "config.json")
    (damaged / "config.json").write_text("{")
    assert_refused(command("inspect", "--run", damaged), f"{damaged / 'config.json'}: ")


def assert_refused(result, *messages):
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("flaxformer-mt: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for message in messages:
        assert message in err


def test_a_pipe_that_closes_early_ends_quietly(run, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["inspect", "--run", str(run)]) == 1
    assert capsys.readouterr().err == ""


def test_help_does_not_wait_for_jax():
    code = (
        "import sys, flaxformer_mt.cli as cli\n"
        "try: cli.main(['translate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"--beam-size" in result.stdout
