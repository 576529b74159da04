"""The console script: output, errors and help."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import optax
import pytest
from talker import DATA, make_talker, random_params, sentences

from flaxformer_mt.cli import entry_points, main, program
from flaxformer_mt.cli.output import line_writer
from flaxformer_mt.config import DecodeConfig, ExperimentConfig, to_json
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, open_corpora
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.decoding.line_format import read_sentence
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.decoding.translator import Sentence, Translator
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.runs.checkpoint import Checkpoints, write_params
from flaxformer_mt.runs.folder import write_run
from flaxformer_mt.trained_model import load_run, write_model
from flaxformer_mt.training.state import TrainState

COMMANDS = [name for group in program.COMMANDS.values() for name in group]
# All are short: each further row length is compiled separately.
LINES = [*sentences(3, longest=2), "", *sentences(2, seed=7, longest=2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder whose best checkpoint is not the last one."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    talker = make_talker()
    vocabulary = talker.tokenizers
    write_run(folder, talker.config, vocabulary.files, {"tokenizer": vocabulary.fingerprints})
    with Checkpoints(folder, keep_last=2) as checkpointer:
        for step, loss in ((1, 1.0), (2, 2.0)):
            params = random_params(talker.model, seed=step)
            state = TrainState(
                step=np.int32(step),
                params=params,
                opt_state=optax.sgd(0.1, momentum=0.9).init(params),
            )
            checkpointer.save(step, state, metrics={"loss": loss})
    return folder


@pytest.fixture
def command(capfdbinary, monkeypatch, tmp_path):
    """Runs the console script and returns exit code, standard output and standard error."""

    def execute(*arguments, stdin=b""):
        (tmp_path / "stdin").write_bytes(stdin)
        with (tmp_path / "stdin").open("rb") as stream:
            monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
            code = main([str(argument) for argument in arguments])
        captured = capfdbinary.readouterr()
        return code, captured.out.decode(), captured.err.decode()

    return execute


def write(path, lines):
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def test_translate_keeps_line_structure(run, command):
    expected = Translator.from_run(run).translate(LINES)
    assert expected[3] == ""
    for text in ("\n".join(LINES) + "\n", "\n".join(LINES), "\r\n".join(LINES) + "\r\n"):
        code, out, err = command("translate", "--run", run, stdin=text.encode())
        assert code == 0
        assert re.fullmatch(r"flaxformer-mt: note: of 6 translations, \d .*\n", err)
        assert out.split("\n") == [*expected, ""]
    assert command("translate", "--run", run, stdin=b"") == (0, "", "")


def test_translate_reads_and_writes_files(run, command, tmp_path):
    expected = command("translate", "--run", run, stdin="\n".join(LINES).encode())[1]
    source, output = tmp_path / "source.gz", tmp_path / "output"
    source.write_bytes(gzip.compress("\n".join(LINES).encode()))
    files = ("--input", source, "--output", output)
    assert command("translate", "--run", run, *files)[:2] == (0, "")
    assert output.read_text() == expected
    source.write_bytes(gzip.compress(b"Hund\n\xff\n"))
    assert_rejected(command("translate", "--run", run, *files), f"{source}, line 2: not UTF-8")
    assert output.read_text() == expected


def test_interrupted_translations_equal_a_whole_one(run, command, tmp_path):
    options = ("--n-best", "2")
    arguments = ("translate", "--run", run, *options, "--input", write(tmp_path / "in", LINES))
    assert command(*arguments, "--output", tmp_path / "out")[0] == 0
    wanted = (tmp_path / "out").read_bytes()

    resumed = tmp_path / "resumed"
    assert command(*arguments, "--output", resumed, "--resume")[0] == 0
    assert resumed.read_bytes() == wanted
    resumed.unlink()
    (tmp_path / "resumed.partial").write_bytes(wanted[: len(wanted) // 2])
    assert command(*arguments, "--output", resumed, "--resume")[0] == 0
    assert resumed.read_bytes() == wanted

    other = command(*arguments, "--beam-size", "5", "--output", resumed, "--resume")
    assert_rejected(other, "begun with other search", "give another --output")
    assert_rejected(command("translate", "--run", run, "--resume"), "--input and --output")


@pytest.mark.slow
def test_json_lines_contain_the_requested_fields(run, command):
    lines = [{"text": "ein Hund"}, {"text": ""}]
    _, out, _ = command(
        "translate", "--run", run, "--input-format", "jsonl", "--format", "jsonl",
        "--alignment", "pieces", "--tokens", "--attention",
        stdin="\n".join(map(json.dumps, lines)).encode(),
    )  # fmt: skip
    ((found,), (empty,)) = (json.loads(line)["translations"] for line in out.splitlines())
    translator = Translator.from_run(run)
    ((expected,),) = translator.translate_n_best(["ein Hund"], unit="pieces", attention=True)
    assert found["text"] == expected.text
    assert found["score"] == pytest.approx(expected.score, abs=1e-5)
    assert found["log_probability"] == pytest.approx(expected.log_probability, abs=1e-5)
    assert tuple(found["tokens"]) == expected.tokens
    assert tuple(found["pieces"]) == expected.pieces
    assert tuple(found["source_pieces"]) == expected.source_pieces
    assert found["alignment"] == " ".join(f"{s}-{t}" for s, t in expected.alignment)
    np.testing.assert_allclose(found["attention"], expected.attention, atol=1e-4)
    assert (empty["text"], empty["alignment"], empty["attention"]) == ("", "", None)
    text = command("translate", "--run", run, "--alignment", "pieces", stdin=b"ein Hund\n\n")[1]
    assert text.split("\n") == [f"{found['text']} ||| {found['alignment']}", " ||| ", ""]


def test_json_lines_give_constraints():
    line = '{"text": "a", "prefix": "b", "phrases": ["c", "d e"]}'
    assert read_sentence(line, "jsonl", "here") == Sentence("a", "b", ("c", "d e"))
    assert read_sentence('{"text": "a"}', "jsonl", "here") == Sentence("a")
    assert read_sentence(line, "text", "here") == Sentence(line)
    assert read_sentence("  ", "jsonl", "here").text.strip() == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Hund", "not JSON: Expecting value"),
        ("[" * 100_000, "its JSON is nested too deeply"),
        ('{"text": ' + "1" * 5000 + "}", "it has a number of too many digits"),
        ('{"text": "\\ud800"}', "it has characters that are not valid Unicode"),
        ('{"text": "a", "text": "b"}', "'text' occurs twice"),
        ('{"text": null}', "text: expected a string, got null"),
        ("3", "expected an object, got an integer"),
        ('{"prefix": "ein"}', "there is no field text"),
        ('{"text": 3}', "text: expected a string, got an integer"),
        ('{"text": "", "phrase": ["a"]}', "unknown field phrase"),
        ('{"text": "", "phrases": "a"}', "phrases: expected a list, got a string"),
    ],
)
def test_invalid_json_lines_are_rejected(line, message):
    with pytest.raises(UserError, match=f"^here( is damaged)?: {re.escape(message)}"):
        read_sentence(line, "jsonl", "here")


def test_a_request_that_the_search_refuses_names_the_input(run, command):
    request = b'{"text": "ein", "phrases": ["Hund bellt"]}\n'
    options = ("--input-format", "jsonl", "--sampling", "--n-best", "1")
    rejected = command("translate", "--run", run, *options, stdin=request)
    assert_rejected(rejected, "standard input: required phrases are not supported with sampling")


AWKWARD = [
    "Hund\u2028bellt", "ein\rHund", "ein\x0cHund", "ein\x00Hund", "\x00", "\x85", "Hund\x0b",
    "\ufeffHund", "👩‍🚀", " ",
]  # fmt: skip


def test_every_line_has_one_translation(run, command):
    """For all characters, and whether or not the last line has a line end."""
    for stdin in ("\n".join(AWKWARD), "\n".join(AWKWARD) + "\n"):
        code, out, err = command(
            "translate", "--run", run, "--max-length", "9", stdin=stdin.encode(),
        )  # fmt: skip
        assert code == 0
        assert not err or re.fullmatch(r"flaxformer-mt: note: of 10 translations, .*\n", err)
        assert out.count("\n") == len(out.splitlines()) == len(AWKWARD)


def test_lines_that_are_written_to_a_pipe_are_not_held_back(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with line_writer(path) as write:
        write(["Hund"])
        assert os.read(reading, 100) == b"Hund\n"
    os.close(reading)


def test_score_prints_one_log_probability_per_line(run, command, tmp_path):
    sources, targets = sentences(4), sentences(4, seed=5)
    code, out, _ = command(
        "score", "--run", run, "--checkpoint", "last",
        "--source", write(tmp_path / "source", sources),
        "--target", write(tmp_path / "target", targets),
    )  # fmt: skip
    model = load_run(run, "last")
    scores = Scorer(model.config.model, model.params, model.tokenizers, model.config.decode).stream(
        zip(sources, targets, strict=True)
    )
    assert code == 0
    assert [float(line) for line in out.splitlines()] == pytest.approx(
        [score.log_probability for score in scores], abs=1e-6
    )


def test_evaluate_without_files_takes_the_test_split_of_the_run(run, command, tmp_path):
    folder, model = tmp_path / "run", load_run(run)
    data = dataclasses.replace(model.config.data, path=str(tmp_path), test_split="dev")
    sources = ["a b c d", "b"]
    write(tmp_path / f"dev.{data.source_language}", sources)
    write(tmp_path / f"dev.{data.target_language}", Translator.from_run(run).translate(sources))
    (corpus,) = open_corpora(data, "test")

    def write_with(folder, data):
        config = dataclasses.replace(model.config, data=data)
        record = {"test": [corpus.fingerprint], "tokenizer": model.tokenizers.fingerprints}
        write_run(folder, config, model.tokenizers.files, record)
        write_params(folder, 1, model.params)

    write_with(folder, data)
    code, out, err = command("evaluate", "--run", folder)
    assert code == 0
    assert "note: the test split of" in err
    assert json.loads(out)["sentences"] == 2
    assert '"bleu": 100.0,' in out  # sacreBLEU: 100.00000000000004
    only_one = ("--source", tmp_path / f"dev.{data.source_language}")
    assert_rejected(command("evaluate", "--run", folder, *only_one), "--source", "--reference")
    write(tmp_path / f"dev.{data.source_language}", ["other text", "b"])
    assert_rejected(command("evaluate", "--run", folder), "test corpus", "is not the text")
    write_with(tmp_path / "other", dataclasses.replace(data, test_split=""))
    refused = command("evaluate", "--run", tmp_path / "other", "--split", "test")
    assert_rejected(refused, "has no test split")


def test_translate_prompts_on_a_terminal(run, monkeypatch, capfdbinary):
    expected = Translator.from_run(run).translate(LINES[:2])
    keyboard, terminal = os.openpty()
    os.write(keyboard, "".join(f"{line}\n" for line in LINES[:2]).encode() + b"\x04")
    with os.fdopen(terminal, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=stream))
        assert main(["translate", "--run", str(run)]) == 0
    os.close(keyboard)
    captured = capfdbinary.readouterr()
    assert captured.out.decode().splitlines() == expected
    assert "type a sentence; Ctrl-D ends" in captured.err.decode()
    assert b"\n> " in captured.err


def test_inspect_shows_what_there_is(tmp_path, command):
    talker = make_talker()
    params = random_params(talker.model)
    write_model(tmp_path / "imported", talker.config, talker.tokenizers, params)
    lines = command("inspect", "--run", tmp_path / "imported")[1].splitlines()
    assert "None" not in "\n".join(lines)
    assert lines[:2] == ["step: 0", "checkpoints.0: not validated"]


def test_help_shows_the_defaults_of_the_run(run, capsys):
    for command in ("translate", "evaluate"):
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--run", str(run), "--help"])
        assert exit_info.value.code == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for field in dataclasses.fields(DecodeConfig):
            assert f"--{field.name.replace('_', '-')} " in text
        assert "1 = greedy search. (default: 3; >= 1)" in text


def copy_without(run, folder, *missing):
    """Copies the run folder (by links) without some of its content."""
    folder.mkdir()
    for path in run.iterdir():
        if path.name not in missing:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "is not a run folder: it has no config.json"),
        ("tokenizer", "is missing"),
        ("checkpoints", "holds no checkpoint"),
    ],
)
def test_incomplete_run_folders_are_rejected(run, command, tmp_path, missing, message):
    folder = copy_without(run, tmp_path / "run", missing)
    assert_rejected(command("inspect", "--run", folder), str(folder), message)


def test_errors_are_one_line(run, command, tmp_path):
    two, three = write(tmp_path / "two", "ab"), write(tmp_path / "three", "abc")
    assert_rejected(command("inspect", "--run", tmp_path / "no"), "there is no run folder", "no")
    assert_rejected(command("inspect", "--run", run, "--checkpoint", "7"), "step 7", "1, 2")
    assert_rejected(
        command("score", "--run", run, "--source", two, "--target", three),
        f"{two} has 2 lines but {three} has 3",
    )
    assert_rejected(
        command("evaluate", "--run", run, "--source", tmp_path / "no", "--reference", two),
        f"there is no file {tmp_path / 'no'}",
    )
    assert_rejected(
        command("translate", "--run", run, stdin=b"good\nbad \xff\n"), "standard input, line 2"
    )
    assert_rejected(
        command("translate", "--run", run, "--n-best", "9"),
        "--n-best=9 is more than --beam-size=3",
    )
    score = ("score", "--run", run, "--source", two, "--target", two)
    for options, message in (
        (["--alignment-layer", "0"], "--alignment-layer is for --alignment only"),
        (["--summary", "--json"], "--json is for lines without --summary only"),
        (["--summary", "--alignment", "words"], "--alignment is for lines without --contrast"),
    ):
        assert_rejected(command(*score, *options), message)
    assert_rejected(command("translate"), "--run is missing")
    several = ("--run", run, "--run", tmp_path / "other")
    assert_rejected(command("translate", *several), f"there is no run folder {tmp_path / 'other'}")
    assert_rejected(
        command("translate", "--run", run, "--tokens"), "--tokens requires --format jsonl"
    )
    assert_rejected(
        command("translate", "--run", run, "--input", tmp_path / "no"),
        f"there is no file {tmp_path / 'no'}",
    )
    damaged = copy_without(run, tmp_path / "damaged", "config.json")
    (damaged / "config.json").write_text("{")
    assert_rejected(command("inspect", "--run", damaged), f"{damaged / 'config.json'}: ")


def test_a_vocabulary_of_another_size_is_rejected(run, command, tmp_path):
    folder, model = tmp_path / "run", load_run(run)
    corpus = ParallelCorpus(sentences(50), sentences(50), "made up")
    other = Tokenizers.train([corpus], dataclasses.replace(DATA, vocab_size=290))
    write_run(folder, model.config, other.files, {"tokenizer": other.fingerprints})
    write_params(folder, model.step, model.params)
    message = "has 290 source tokens, but the model was trained with 300"
    for name in ("inspect", "translate"):
        assert_rejected(command(name, "--run", folder), f"{folder / 'tokenizer'} {message}")


@pytest.mark.parametrize("lacking", ["encoder", "params"])
def test_checkpoints_of_another_state_are_rejected(run, command, tmp_path, lacking):
    folder = copy_without(run, tmp_path / "run", "checkpoints")
    params = random_params(make_talker().model)
    params.pop(lacking, None)
    name = "weights" if lacking == "params" else "params"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"step": np.int32(1), name: params})
    assert_rejected(command("translate", "--run", folder, stdin=b"a\n"), str(folder))


def assert_rejected(result, *messages):
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("flaxformer-mt: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for message in messages:
        assert message in err


def test_a_path_that_the_system_refuses_is_named(command, tmp_path):
    name = "a" * 300
    assert_rejected(command("translate", "--run", name), f"{name}: File name too long")
    code = entry_points.train([f"--config={tmp_path / name}", f"--workdir={tmp_path}"])
    assert code == ExitCode.FAILURE


@pytest.mark.parametrize("name", ["inspect", "translate"])
def test_a_pipe_that_closes_early_ends_quietly(run, command, monkeypatch, name):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code, _, err = command(name, "--run", run, stdin=b"Hund\n")
    assert (code, err) == (1, "")


@pytest.fixture
def printed(monkeypatch, capfd):
    """Runs the console script with another standard output; returns exit code and errors."""

    def execute(stdout, *arguments):
        monkeypatch.setattr(sys, "stdout", stdout)
        code = main([str(argument) for argument in arguments])
        return code, capfd.readouterr().err

    return execute


@pytest.mark.parametrize("name", [None, "translate"])
def test_help_whose_reader_is_gone_ends_quietly(printed, name):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stdout:
        assert printed(stdout, *filter(None, [name]), "--help") == (1, "")


@pytest.mark.parametrize("buffering", [1, -1])
@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--run"], ["train", "--help"]])
def test_standard_output_on_a_full_disk(printed, run, arguments, buffering):
    arguments = [*arguments, run] if arguments[-1] == "--run" else arguments
    program = "flaxformer-mt train" if arguments[0] == "train" else "flaxformer-mt"
    with open("/dev/full", "w", buffering=buffering) as stdout:
        assert printed(stdout, *arguments) == (
            1,
            f"{program}: error: standard output cannot be written: No space left on device\n",
        )


def test_closed_standard_streams_are_errors(printed, run, monkeypatch):
    error = "flaxformer-mt: error: {}: Bad file descriptor\n"
    unwritable = error.format("standard output cannot be written")
    assert printed(None, "inspect", "--run", run) == (1, unwritable)
    monkeypatch.setattr(sys, "stdin", None)
    unreadable = error.format("cannot read standard input")
    assert printed(sys.stdout, "translate", "--run", run) == (1, unreadable)


def test_help_does_not_import_jax():
    code = (
        "import sys, flaxformer_mt.cli as cli\n"
        "try: cli.main(['translate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"--beam-size" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_keeps_the_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "(default: )" in line]
    shown = examples("\n".join(lines))
    assert shown
    assert shown == examples(docstring(name))
    assert all(words[1] in COMMANDS for words in shown)


def examples(text):
    """Returns the words of each example in a help text, with continuation lines joined."""
    lines = text.replace(" \\\n", " ").splitlines()
    return [line.split() for line in lines if line.strip().startswith("flaxformer-mt ")]


def docstring(name):
    return next(group[name].__doc__ for group in program.COMMANDS.values() if name in group)


def test_the_overview_fits_a_screen(capsys, monkeypatch):
    for arguments in (["--help"], ["-h"], []):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 26
        assert max(map(len, lines)) <= 80
        assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


def test_unknown_commands_are_rejected_with_a_suggestion(capsys):
    for name, message in {
        "tranlate": "unknown command tranlate; did you mean translate?",
        "x": "unknown command x; see flaxformer-mt --help",
    }.items():
        with pytest.raises(SystemExit) as exit_info:
            main([name])
        assert exit_info.value.code == 2
        assert capsys.readouterr().err == f"flaxformer-mt: error: {message}\n"


@pytest.mark.parametrize("place", ["config.json", "checkpoints/4/manifest.json"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["translate"],
        ["lexicon", "--source=source.txt", "--target=source.txt"],
        ["evaluate"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_output_replaces_a_file_of_a_trained_model(tmp_path, capsys, arguments, place):
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    (run / "checkpoints" / "4").mkdir(parents=True)
    (run / "config.json").write_text(to_json(ExperimentConfig()))
    files = [path for path in run.rglob("*") if path.is_file()]
    content = [path.read_bytes() for path in files]
    assert main([*arguments, f"--run={run}", f"--output={run / place}"]) == ExitCode.FAILURE
    assert f"{run / place} cannot be written: it belongs to a trained model" in (
        capsys.readouterr().err
    )
    assert [path for path in run.rglob("*") if path.is_file()] == files
    assert [path.read_bytes() for path in files] == content
