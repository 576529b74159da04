"""Parallel text, a finished run on it, and runs of `train.py` that must fail."""

import gzip
import shutil

import pytest
from small_runs import flags

from flaxformer_mt import experiment
from flaxformer_mt.cli import entry_points, training
from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.exit_codes import ExitCode


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of parallel text: English and German phrases; the test split gzipped."""
    folder = tmp_path_factory.mktemp("text")
    config = DataConfig(corpus="phrases", generated_pairs=300)
    for split, size in (("train", 300), ("valid", 20), ("test", 8)):
        corpus = load_corpus(config, split)
        for language, lines in (("en", corpus.sources), ("de", corpus.targets)):
            data = "".join(f"{line}\n" for line in lines[:size]).encode()
            path = folder / f"{split}.{language}"
            if split == "test":
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """A run of 6 steps without interruption."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    training.train(training.parse_flags(flags(text, workdir, "--train.num-steps=6")))
    return workdir


@pytest.fixture(scope="session")
def begun(text, tmp_path_factory):
    """A run that has written its configuration, vocabulary and fingerprints, and no step."""
    workdir = tmp_path_factory.mktemp("runs") / "begun"
    config = training.parse_flags(flags(text, workdir, "--train.num-steps=6")).experiment()
    with experiment.open_folder(workdir):
        experiment.prepare(config, workdir)
    return workdir


@pytest.fixture
def refuse(capsys):
    """Runs `train.py`, which must leave with one line of complaint; returns the line."""

    def run(*arguments):
        assert entry_points.train(arguments) == ExitCode.FAILURE
        error = capsys.readouterr().err
        assert error.startswith("train.py: error: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def refused(refuse, text, tmp_path):
    """Trains on a damaged copy of the text; nothing must be written."""

    def run(damage, *options):
        copy = tmp_path / "copy"
        shutil.copytree(text, copy)
        damage(copy)
        workdir = tmp_path / "run"
        error = refuse(*flags(copy, workdir, *options))
        assert not workdir.exists()
        return error

    return run
