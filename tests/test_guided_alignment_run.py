"""Runs that learn the links of an alignment file."""

import dataclasses

import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.config import (
    CorpusConfig,
    DataConfig,
    DecodeConfig,
    ExperimentConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.config.experiment import with_changes
from flaxformer_mt.decoding.scoring.scorer import Scorer
from flaxformer_mt.errors import UserError
from flaxformer_mt.trained_model import load_run

COUNT = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Sentences of words a0, a1, ..., and the same as b0, b1, ... in reverse."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    sentences = [random.permutation(COUNT)[: random.integers(2, 7)] for _ in range(400)]
    texts = {
        "train.en": [" ".join(f"a{word}" for word in words) for words in sentences],
        "train.de": [" ".join(f"b{word}" for word in words[::-1]) for words in sentences],
        "train.align": [
            " ".join(f"{index}-{len(words) - 1 - index}" for index in range(len(words)))
            for words in sentences
        ],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return ExperimentConfig(
        model=TransformerConfig(
            d_model=32,
            num_heads=2,
            d_ff=64,
            num_encoder_layers=1,
            num_decoder_layers=2,
            dropout_rate=0.0,
        ),
        data=DataConfig(
            path=str(folder),
            alignments=str(folder / "train.align"),
            valid_corpora=(CorpusConfig(path=str(folder), split="train"),),
            test_split="",
            tokenizer="word",
            vocab_size=40,
            source_row_length=16,
            target_row_length=16,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=20),
        train=TrainConfig(
            num_steps=150,
            batch_tokens=256,
            log_every=150,
            eval_every=150,
            checkpoint_every=150,
            eval_sentences=1,
            guided_alignment_weight=1.0,
        ),
        decode=DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=2),
        parallel=ParallelConfig(num_devices=1),
    )


def accuracy(run):
    """The share of target words that are aligned to the word that they translate."""
    random = np.random.default_rng(1)
    sentences = [random.permutation(COUNT)[: random.integers(2, 7)] for _ in range(50)]
    pairs = [
        (" ".join(f"a{word}" for word in words), " ".join(f"b{word}" for word in words[::-1]))
        for words in sentences
    ]
    trained = load_run(run.folder, "last")
    scorer = Scorer(trained.model, trained.params, trained.tokenizers, trained.config.decode)
    hits = [
        source == len(words) - 1 - target
        for words, score in zip(sentences, scorer.stream(pairs, "words"), strict=True)
        for source, target in score.alignment
    ]
    return np.mean(hits)


@pytest.mark.slow
def test_a_run_that_learns_links_is_better_aligned(config, tmp_path):
    guided = fmt.train(config, tmp_path / "guided")
    plain = fmt.train(
        with_changes(
            config, {"train": {"guided_alignment_weight": 0.0}, "data": {"alignments": ""}}
        ),
        tmp_path / "plain",
    )
    (training,) = guided.metrics("train")
    assert training["alignment"] > 0
    assert "alignment" not in plain.metrics("train")[0]
    assert accuracy(guided) > 0.95
    assert accuracy(plain) < 0.9
    # The run is continued with the same weight only.
    longer = with_changes(config, {"train": {"num_steps": 151}})
    other = with_changes(longer, {"train": {"guided_alignment_weight": 2.0}})
    with pytest.raises(UserError, match=r"train\.guided_alignment_weight: 1\.0 in the run, 2\.0 n"):
        fmt.train(other, guided.folder)
    assert fmt.train(longer, guided.folder).latest_step == 151


def test_options_that_do_not_fit_together(config, tmp_path):
    with pytest.raises(UserError, match=r"guided_alignment_weight=1\.0 needs data\.alignments"):
        ExperimentConfig(train=TrainConfig(guided_alignment_weight=1.0))
    with pytest.raises(UserError, match=r"cannot be used with train\.r_drop: set it to 0"):
        TrainConfig(guided_alignment_weight=1.0, r_drop=5.0)
    with pytest.raises(UserError, match=r"cannot be used with train\.teacher: set it to 0"):
        TrainConfig(guided_alignment_weight=1.0, teacher="runs/a")
    with pytest.raises(UserError, match=r"train\.guided_alignment_layer=2: the decoder has 2 lay"):
        with_changes(config, {"train": {"guided_alignment_layer": 2}})
    unused = dataclasses.replace(
        config, train=dataclasses.replace(config.train, guided_alignment_weight=0.0)
    )
    with pytest.raises(UserError, match=r"data\.alignments=.* has no effect: set train\.guided"):
        fmt.train(unused, tmp_path / "run")
