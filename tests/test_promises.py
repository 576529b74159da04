"""What the project promises, one test each. Whoever breaks one of them breaks the project."""

import dataclasses
import pickle
import random
import shutil
import signal
import subprocess
import sys

import chex
import hub_models
import jax
import numpy as np
import optax
import pytest
import sacrebleu
from drawn_params import drawn_params
from generate_pairs import differences, random_pair
from hypothesis import given, settings
from slow_search import enumerate_hypotheses
from tiny_setup import DROPOUT, EXPERIMENT, LENGTH, Setup, mean_loss, results
from toy_references import ALL, ONE_OF_EACH
from toy_search import (
    SPECIAL,
    WORDS,
    P,
    assert_row_is,
    batched,
    ends,
    find,
    node_of,
    numbers,
    random_world,
    seeds,
    three_constraints,
    with_numbers,
)

import flaxformer_mt as fmt
from flaxformer_mt import interop, parity
from flaxformer_mt.config import DataConfig, DecodeConfig, ParallelConfig, TrainConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.stream.batches import BatchShape, make_batch
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.decoding.search.options import SearchOptions
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.convert import OWN, convert
from flaxformer_mt.parity.families.recipes import recipe
from flaxformer_mt.parity.trace.sites import sites
from flaxformer_mt.run_layout import CHECKPOINTS, TOKENIZER
from flaxformer_mt.trained_model import load_run


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_published_model_has_the_same_values_and_gradients(family):
    """Every family computes each value, loss and gradient of its PyTorch reference in float64."""
    variant = ALL[ONE_OF_EACH[family]]
    # Rules for weights are those of each layer; in T5, layers share the first one's biases.
    layers = {"num_encoder_layers": 2 if family == "t5" else 1, "num_decoder_layers": 1}
    variant = dataclasses.replace(variant, sizes=variant.sizes | layers)
    reference = variant.build("float64")
    config, _ = interop.load(family, reference.state_dict(), **variant.hints)
    batch = parity.example(config, rows=6, source_padding=recipe(family).source_padding)
    report = parity.compare(family, reference, batch, **variant.hints)
    assert report.passed, report
    assert max(row.max_rel for row in report.rows) < 1e-10
    assert not report.untapped
    trained = {f"gradient/{n}" for n, p in reference.named_parameters() if p.requires_grad}
    assert {row.site for row in report.rows} >= {site.name for site in sites(config)} | trained


@pytest.mark.usefixtures("float64")
def test_packed_sentences_are_trained_like_separate_ones():
    """Sentences that share a row have the loss and gradient that they have without company."""
    config = dataclasses.replace(EXPERIMENT.model, dtype="float64", param_dtype="float64")
    params = drawn_params(config)
    sources = [[3, 4, 2], [5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2], [3, 2]]
    targets = [[4, 4, 6, 2], [7, 2], [8, 9, 10, 2], [11, 2], [12, 3, 5, 7, 2]]
    pairs = TokenPairs(Sentences.from_lists(sources), Sentences.from_lists(targets))

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        sums = fmt.cross_entropy(config, params, batch, smoothing=0.1)
        return sums.loss / sums.weight

    together = make_batch(pairs, [[0, 1, 2], [4, 3]], BatchShape(2, 12, 12), config)
    alone = make_batch(pairs, [[number] for number in range(5)], BatchShape(5, 5, 5), config)
    names = ("encoder_segment_ids", "decoder_segment_ids", "encoder_positions", "decoder_positions")
    alone = dataclasses.replace(alone, **dict.fromkeys(names))
    one_by_one = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)
    expected = one_by_one(fmt.Transformer(config), params, alone)
    chex.assert_trees_all_close(loss(params, together), expected, rtol=1e-12, atol=1e-13)


def test_many_devices_train_like_one():
    """A model that is sharded over devices in three ways is trained like on one, with dropout."""
    parallel = {"fsdp": 2, "tensor": 2}
    on_eight = results(Setup.of(num_devices=8, parallel=parallel, model=DROPOUT), 3)
    chex.assert_trees_all_close(on_eight, results(Setup.of(model=DROPOUT), 3), atol=1e-5, rtol=0)


def test_accumulated_parts_have_the_gradient_of_the_whole_batch():
    """Parts with different numbers of tokens are weighted by them."""
    tiny = Setup.of(accumulation_steps=16, bigram=True)
    state, batch = tiny.state(), tiny.batch(0)
    tokens = batch.decoder_loss_weights.reshape(-1, 16, LENGTH).sum(axis=(0, 2))
    assert tokens.max() > tokens.min() + 5
    whole = jax.jit(jax.grad(mean_loss, argnums=1), static_argnums=0)
    expected = whole(tiny.model, state.params, batch)
    chex.assert_trees_all_close(tiny.gradients(state, batch)[0], expected, atol=1e-6, rtol=0)
    assert optax.tree.norm(expected) > 0.1


WIDEST = SearchOptions(
    **SPECIAL,
    beam_size=len(WORDS) ** (P - 1) * (len(WORDS) + 1),  # Wide enough for every hypothesis.
    n_best=6,
    length_penalty=1.0,
    no_repeat_ngram_size=2,
    bad_phrases=((3, 4), (5, 5), (4, 3, 5)),
    min_length=True,
)


@settings(max_examples=12)
@given(seeds, ends, numbers, three_constraints)
def test_a_wide_beam_finds_the_best_of_all_hypotheses(seed, end, numbers, per_row):
    """Beam search finds what exhaustive search finds, under rules and constraints."""
    world, options = random_world(seed, end), with_numbers(WIDEST, numbers)
    found = find(world, batched(per_row), options)
    for row, constraints in enumerate(per_row):
        logits = world[0][row].astype(np.float64)
        every = enumerate_hypotheses(
            lambda tokens, logits=logits: logits[node_of(tokens)].tolist(),
            WORDS, constraints, options,
        )  # fmt: skip
        assert_row_is(found, row, every[: options.n_best])


def test_translations_are_those_of_generate():
    """Beam search finds the tokens and scores that `generate` of transformers finds."""
    pair = random_pair()
    mean, ties = differences(pair, pair.random_sources(20), 4, True, 1.0)
    assert ties == []
    assert 2 < mean < pair.max_length - 1


RUN = fmt.ExperimentConfig(
    model=fmt.TransformerConfig(
        d_model=8, num_heads=2, d_ff=16, num_encoder_layers=1, num_decoder_layers=1
    ),
    data=DataConfig(corpus="reverse", generated_pairs=50, vocab_size=280),
    train=TrainConfig(
        num_steps=6, batch_tokens=256, checkpoint_every=2, eval_every=6, log_every=1,
        eval_sentences=1,
    ),
    decode=DecodeConfig(beam_size=1, max_length_factor=0, max_length_extra=2),
    parallel=ParallelConfig(num_devices=1),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run."""
    return fmt.train(RUN, tmp_path_factory.mktemp("promises") / "run")


KILLED_WHILE_IT_SAVES = """
import os, pickle, signal, sys

def audit(event, arguments):
    # A checkpoint has another name until it is whole.
    if event == "os.rename" and str(arguments[1]).endswith("checkpoints/4"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
import flaxformer_mt as fmt
fmt.train(pickle.load(sys.stdin.buffer), sys.argv[1])
"""


def test_a_run_that_is_killed_continues_to_the_same_bits(run, tmp_path):
    """A run that is killed amid a save and started again ends like one that was not, bit by bit."""
    command = [sys.executable, "-c", KILLED_WHILE_IT_SAVES, tmp_path / "run"]
    killed = subprocess.run(command, input=pickle.dumps(RUN), capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert fmt.Run(tmp_path / "run").latest_step == 2
    continued = fmt.train(RUN, tmp_path / "run")
    for step in ("last", "best"):
        chex.assert_trees_all_equal(
            load_run(continued.folder, step).params, load_run(run.folder, step).params
        )
    losses, expected = (
        [(row["step"], row["split"], row["loss"]) for row in each.metrics()]
        for each in (continued, run)
    )
    assert losses == expected


def test_a_flipped_bit_is_found(run, tmp_path):
    """One flipped bit in any file of a model is found when it is read, and the file is named."""
    copied = shutil.copytree(run.folder, tmp_path / "run")
    draw = random.Random(0)
    parts = copied / CHECKPOINTS / "6", copied / TOKENIZER
    for path in (path for part in parts for path in part.rglob("*") if path.is_file()):
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(UserError, match=f"{path.name}|checkpoints/6"):
            load_run(copied, 6)
        path.write_bytes(content)
    assert load_run(copied, 6).step == 6


def test_the_whole_pipeline_learns(trained_run):
    """From text to a vocabulary, a model and its translations: a run learns, if it is short."""
    run = fmt.Run(trained_run)
    assert run.metrics("valid")[-1]["accuracy"] > 0.6
    corpus = load_corpus(run.config.data, "valid")
    found = run.translator().translate(corpus.sources[:20], beam_size=1)
    right, wrong = (
        sacrebleu.corpus_chrf(found, [references]).score
        for references in (corpus.targets[:20], corpus.targets[20:40])
    )
    assert right > wrong + 15


HUB = {"t5": "t5", "m2m100": "nllb", "mbart": "mbart50"}
TEXTS = ["one two three", "four five six seven", "eight nine ten"] * 20


@pytest.mark.parametrize("family", [*HUB, "marian", "jax"])
def test_a_folder_of_each_format_survives(family, trained_run, tmp_path):
    """A folder of any format that becomes a run and a folder again keeps every bit of the model."""
    folder, run, again, back = (tmp_path / name for name in ("folder", "run", "again", "back"))
    if family in HUB:
        hub_models.save(HUB[family], TEXTS, folder)
    else:
        convert(OWN, family, trained_run, folder)
    convert(family, OWN, folder, run)
    convert(OWN, family, run, again)
    convert(family, OWN, again, back)
    first, last = load_run(run), load_run(back)
    chex.assert_trees_all_equal(last.params, first.params)
    assert last.config == first.config
    assert last.tokenizers.files == first.tokenizers.files
    if family not in HUB:
        chex.assert_trees_all_equal(first.params, load_run(trained_run).params)
