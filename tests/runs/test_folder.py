"""Configurations, texts and vocabularies that a run cannot be continued with."""

import json

import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.folder import check_unchanged, holds_run, write_run

EXPERIMENT = ExperimentConfig()
PAIRS = ["one two three", "four five", "six"], ["eins zwei drei", "vier fünf", "sechs"]


def corpora(sources=PAIRS[0]):
    train, valid = ParallelCorpus(sources, PAIRS[1], "train.en"), ParallelCorpus(*PAIRS, "valid.en")
    return {"train": [train], "valid": [valid]}


def learn(vocab_size):
    return Tokenizers.train([ParallelCorpus(*PAIRS, "text")], DataConfig(vocab_size=vocab_size))


@pytest.fixture(scope="module")
def tokenizers():
    return learn(300)


@pytest.fixture
def workdir(tmp_path, tokenizers):
    write_run(tmp_path / "run", EXPERIMENT, corpora(), tokenizers)
    return tmp_path / "run"


def test_a_folder_without_a_run(tmp_path):
    assert not holds_run(tmp_path / "none", EXPERIMENT)


def test_the_same_run_goes_on(workdir):
    assert holds_run(workdir, EXPERIMENT)
    check_unchanged(workdir, corpora(), Tokenizers.load(workdir / "tokenizer"))


def test_another_configuration(workdir):
    other = ExperimentConfig(train=TrainConfig(seed=1))
    with pytest.raises(UserError, match=r"train\.seed: 0 in the run, 1 now"):
        holds_run(workdir, other)


def test_a_damaged_configuration(workdir):
    (workdir / "config.json").write_text('{"model"')
    with pytest.raises(UserError, match=r"config\.json: not a configuration"):
        holds_run(workdir, EXPERIMENT)


def test_other_text(workdir, tokenizers):
    changed = corpora(sources=["one two three", "four six", "six"])
    with pytest.raises(UserError, match=r"the train corpus \(train\.en\) is not the text"):
        check_unchanged(workdir, changed, tokenizers)


def test_another_corpus_less(workdir, tokenizers):
    more = corpora()
    more["valid"] *= 2
    with pytest.raises(UserError, match="the valid corpus"):
        check_unchanged(workdir, more, tokenizers)


def test_another_vocabulary(workdir):
    learn(301).save(workdir / "tokenizer")
    with pytest.raises(UserError, match="is not the vocabulary"):
        check_unchanged(workdir, corpora(), Tokenizers.load(workdir / "tokenizer"))


def test_damaged_fingerprints(workdir, tokenizers):
    (workdir / "data.json").write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match=r"data\.json cannot be read"):
        check_unchanged(workdir, corpora(), tokenizers)
