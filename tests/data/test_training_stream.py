import dataclasses
import json
from collections import Counter

import chex
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from flaxformer_mt import distributed
from flaxformer_mt.config import (
    DataConfig,
    ExperimentConfig,
    TrainConfig,
    TransformerConfig,
)
from flaxformer_mt.data.stream import mixture, packing
from flaxformer_mt.data.stream.batches import BatchShape, DataPosition, Shard
from flaxformer_mt.data.stream.packing import Sentences
from flaxformer_mt.data.stream.training_stream import TrainingStream, choose_source_row_length
from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.errors import UserError
from tests.data.pairs import all_pairs, encoded, pairs_in, pairs_of_lengths

DATA = DataConfig(source_row_length=12, target_row_length=10)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(mixture, "SINGLE_BLOCK_PAIRS", 20)
    monkeypatch.setattr(mixture, "BLOCK_PAIRS", 1000)


@pytest.fixture
def many_streams(monkeypatch):
    """Blocks of four pairs, and a stream for every 8 to 16 pairs."""
    monkeypatch.setattr(mixture, "BLOCK_PAIRS", 4)


def config(seed=0, rows=4, model=None, **data):
    data = dataclasses.replace(DATA, **data)
    train = TrainConfig(batch_tokens=rows * data.row_lengths[1], seed=seed)
    return ExperimentConfig(data=data, train=train, model=model or TransformerConfig())


def random_pairs(count, seed=0, longest=9, **fields):
    return pairs_of_lengths(
        np.random.default_rng(seed).integers(2, longest + 1, (count, 2)), **fields
    )


def read_epochs(stream, epochs=1):
    """Returns the pairs of the first epochs, as counters; epochs must end with a batch."""
    position = DataPosition()
    pairs = [Counter() for _ in range(epochs)]
    while position.epoch < epochs:
        epoch = position.epoch
        batch, position = stream.read(position)
        pairs[epoch].update(pairs_in(batch))
    assert position == DataPosition(epochs, step=position.step)
    return pairs


def read_batches(stream, count, position=DataPosition()):  # noqa: B008
    batches = []
    for _ in range(count):
        batch, position = stream.read(position)
        batches.append(batch)
    return batches


class RepeatingSampler:
    """Returns n to 2n tokens for a text of n letters, all equal to the number of the text."""

    def sample(self, texts, seed, amount):
        random = np.random.default_rng(seed)
        return [[int(text)] * random.integers(1, 20) for text in texts]

    def with_source_end(self, tokens):
        return [*tokens, TransformerConfig.eos_id]

    sample_sources = Tokenizer.sample_sources


def sampled_corpus(count):
    corpus = random_pairs(count)
    texts = Sentences.from_texts([str(10 + i) for i in range(count)])
    return dataclasses.replace(corpus, fields={"text": texts})


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=1, max_size=80),
    rows=st.integers(1, 8),
    seed=st.integers(0, 100),
    buckets=st.booleans(),
)
def test_batches_across_blocks_and_epochs_contain_every_pair(lengths, rows, seed, buckets):
    corpus = pairs_of_lengths(lengths)
    batching = "buckets" if buckets else "packed"
    setting = config(seed, rows, batching=batching, bucket_lengths=(4, 12))
    stream = TrainingStream([corpus], setting)
    position, seen = DataPosition(), Counter()
    while position.epoch < 2:
        batch, position = stream.read(position)
        assert BatchShape(*batch.encoder_input_tokens.shape, batch.decoder_positions.shape[1]) in (
            stream.shapes
        )
        seen.update(pairs_in(batch))
    pairs = Counter(all_pairs(corpus))
    # Two epochs, and the pairs of the third that are in the last batch.
    assert set(seen) == set(pairs)
    assert all(seen[pair] >= 2 * count for pair, count in pairs.items())
    if buckets:
        assert seen == pairs + pairs
        assert position.row == 0


@pytest.mark.parametrize("sampling", [0.0, 0.1])
@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_resuming_from_a_saved_position_gives_the_same_batches(batching, sampling):
    setting = config(batching=batching, bucket_lengths=(4, 12), subword_sampling=sampling)
    corpus = sampled_corpus(70)
    stream = TrainingStream([corpus], setting, RepeatingSampler())
    expected = read_batches(stream, 40)
    position = DataPosition()
    for number in range(0, 40, 3):
        saved = json.loads(json.dumps(position._asdict()))
        fresh = TrainingStream([corpus], setting, RepeatingSampler())
        chex.assert_trees_all_equal(
            read_batches(fresh, min(3, 40 - number), DataPosition(**saved)),
            expected[number : number + 3],
        )
        for _ in range(3):
            _, position = stream.read(position)


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_concatenated_shards_equal_the_batch(batching):
    setting = config(batching=batching, bucket_lengths=(4, 12))
    stream = TrainingStream([random_pairs(45)], setting)
    position = DataPosition()
    for _ in range(30):
        whole, after = stream.read(position)
        parts, positions = zip(
            *(stream.read(position, Shard(index, 2)) for index in range(2)), strict=True
        )
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        chex.assert_trees_all_equal(joined, whole)
        assert set(positions) == {after}
        position = after


def test_sampled_sources_that_exceed_a_row_are_not_used():
    corpus = sampled_corpus(60)
    setting = config(rows=1, subword_sampling=0.1)
    epochs = read_epochs(TrainingStream([corpus], setting, RepeatingSampler()), 2)
    originals = {target: len(source) for source, target in all_pairs(corpus)}
    changed = 0
    for pairs in epochs:
        assert sorted(target for _, target in pairs) == sorted(originals)
        for source, target in pairs:
            assert len(source) <= 12
            assert source == (target[0] - 10_000,) * (len(source) - 1) + (2,)
            changed += len(source) != originals[target]
    # RepeatingSampler returns more than 11 tokens nearly half of the time.
    assert 40 < changed < 80
    assert epochs[0] != epochs[1]


def test_language_model_batches_have_no_encoder_side():
    corpus = encoded(None, [[15, 16, 2], [17, 2], [18, 2]])
    setting = config(model=TransformerConfig(has_inputs=False))
    stream = TrainingStream([corpus], setting)
    batch, _ = stream.read(DataPosition())
    assert batch.encoder_input_tokens is None
    assert batch.decoder_loss_weights.sum() == 4 * 7
    assert stream.fill == (0, 0.7)


def test_fill_and_batches_per_epoch_match_the_stream():
    corpus = random_pairs(15)  # One block.
    stream = TrainingStream([corpus], config(rows=1))
    batches = read_batches(stream, round(stream.batches_per_epoch))
    assert sum((Counter(pairs_in(batch)) for batch in batches), Counter()) == Counter(
        all_pairs(corpus)
    )
    assert stream.pairs == 15
    for side, fill in zip(("encoder", "decoder"), stream.fill, strict=True):
        segments = np.concatenate([getattr(batch, f"{side}_segment_ids") for batch in batches])
        assert fill == pytest.approx((segments > 0).mean())
        assert fill > 0.6


# Mixtures of corpora.


def counts_by_corpus(stream, epochs, corpora):
    """Counts the occurrences of the pairs of each corpus over some epochs."""
    seen = sum(read_epochs(stream, epochs), Counter())
    return [[seen[pair] for pair in all_pairs(corpus)] for corpus in corpora]


def test_all_pairs_occur_once_per_epoch_with_equal_weights():
    corpora = [random_pairs(30), random_pairs(7, first=500), random_pairs(1, first=900)]
    stream = TrainingStream(corpora, config(rows=1))
    assert stream.pairs == 38
    assert counts_by_corpus(stream, 1, corpora) == [[1] * 30, [1] * 7, [1]]


@pytest.mark.parametrize(
    ("weights", "temperature", "shares"),
    [((1, 3), 1.0, (2, 1)), ((1, 1), 1e9, (1, 1)), ((1, 1), 2.0, (6**0.5, 1))],
)
def test_mixture_follows_weights_and_temperature(weights, temperature, shares):
    corpora = [
        random_pairs(60, weight=weights[0]),
        random_pairs(10, first=500, weight=weights[1]),
    ]
    stream = TrainingStream(corpora, config(rows=1, mixture_temperature=temperature))
    counts = counts_by_corpus(stream, 6, corpora)
    draws = [sum(of_corpus) for of_corpus in counts]
    assert sum(draws) == pytest.approx(6 * 70, abs=1)
    expected = [6 * 70 * share / sum(shares) for share in shares]
    # Exact to one draw, not only on average.
    np.testing.assert_allclose(draws, expected, atol=1)
    for of_corpus in counts:
        assert max(of_corpus) - min(of_corpus) <= 1


# Pairs longer than a row.

LONG = [(3, 4), (5_000, 4), (5, 6), (7, 11)]


def test_long_pairs_are_dropped_and_counted():
    corpus = pairs_of_lengths(LONG)
    stream = TrainingStream([corpus], config(rows=1))
    short = [pair for i, pair in enumerate(all_pairs(corpus)) if i in (0, 2)]
    assert read_epochs(stream) == [Counter(short)]
    report = stream.corpora[0].report
    assert report.kept == 2
    dropped = report.dropped["longer than a row"]
    assert dropped.count == 2
    assert dropped.example == "pair 2 (5,000 source and 4 target tokens)"


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_lengths_are_read_in_chunks(monkeypatch, chunk):
    """The memory that a corpus takes does not grow with it."""
    monkeypatch.setattr(packing, "_CHUNK", chunk)
    corpora = [random_pairs(40, seed, longest=17) for seed in (1, 2)]
    stream = TrainingStream(corpora, config(rows=1, source_row_length=0))
    fitting = Counter()
    for corpus, own in zip(corpora, stream.corpora, strict=True):
        lengths = np.stack(corpus.lengths)
        fits = (np.array(stream.config.data.row_lengths) >= lengths.T).all(axis=1)
        assert 0 < fits.sum() < 40
        fitting.update(pair for pair, fit in zip(all_pairs(corpus), fits, strict=True) if fit)
        for report, kept in zip((own.report.sources, own.report.targets), lengths, strict=True):
            kept = kept[fits]
            assert (report.tokens, report.longest) == (kept.sum(), kept.max())
            assert report.mean_length == kept.mean()
            assert report.percentile_95 == np.quantile(kept, 0.95, method="inverted_cdf")
    assert read_epochs(stream) == [fitting]


@pytest.mark.parametrize("batching", ["packed", "buckets"])
def test_long_pairs_are_truncated_with_the_end_token_last(batching):
    corpus = pairs_of_lengths(LONG)
    setting = config(
        rows=1, batching=batching, bucket_lengths=(12,), long_sentences="truncate",
        source_row_length=12, target_row_length=10 if batching == "packed" else 12,
    )  # fmt: skip
    stream = TrainingStream([corpus], setting)
    (pairs,) = read_epochs(stream)
    assert ((11,) * 11 + (2,), (10_011,) * 3 + (2,)) in pairs
    assert len(pairs) == 4
    if batching == "packed":
        assert ((13,) * 6 + (2,), (10_013,) * 9 + (2,)) in pairs
        assert stream.corpora[0].report.truncated == 2


@pytest.mark.parametrize(
    ("data", "option"),
    [
        ({}, "data.source_row_length=12, data.target_row_length=10"),
        ({"batching": "buckets", "bucket_lengths": (4, 10)}, "data.bucket_lengths=(4, 10)"),
    ],
)
def test_long_pairs_can_be_rejected(data, option):
    with pytest.raises(UserError) as error:
        TrainingStream([pairs_of_lengths(LONG)], config(long_sentences="error", **data))
    message = str(error.value)
    for part in (
        "made up: 2 of 4 pairs",
        option,
        "the first is pair 2 (5,000 source and 4 target tokens)",
        "set data.long_sentences to drop or truncate",
    ):
        assert part in message
    assert "\n" not in message


# Virtual streams.


@pytest.mark.slow_except("96-0.1")
@pytest.mark.parametrize("sampling", [0.0, 0.1])
@pytest.mark.parametrize("rows", [64, 96, 512])
def test_the_rows_of_processes_are_those_of_one(many_streams, rows, sampling):
    """The number of processes changes three times; each knows the position of its own rows only."""
    corpus, setting = sampled_corpus(600), config(rows=rows, subword_sampling=sampling)
    whole, position = TrainingStream([corpus], setting, RepeatingSampler()), DataPosition()
    expected = read_batches(whole, 12)
    found = []
    for count in (1, 2, 4, 16):
        streams = [TrainingStream([corpus], setting, RepeatingSampler()) for _ in range(count)]
        positions = [position] * count
        for _ in range(3):
            parts, positions = zip(
                *(
                    stream.read(own, Shard(index, count))
                    for index, (stream, own) in enumerate(zip(streams, positions, strict=True))
                ),
                strict=True,
            )
            found.append(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts))
        assert len({position.step for position in positions}) == 1
        position = gathered(positions)
        assert len(position.streams) == 64
    chex.assert_trees_all_equal(found, expected)


def gathered(positions):
    """What each process saves, and reads again."""
    texts = [json.dumps(position.streams) for position in positions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "gather_texts", lambda own: texts)
        saved = {json.dumps(position.to_json()) for position in positions}
    (text,) = saved
    return DataPosition.from_json(json.loads(text))


def test_every_pair_occurs_once_per_epoch_of_several_streams(many_streams):
    corpora = [random_pairs(100, first=1000), random_pairs(33)]
    stream = TrainingStream(corpora, config(rows=1))
    position, seen = DataPosition(), [Counter() for _ in range(4)]
    while not position.streams or min(position.streams)[0] < 3:
        batch, after = stream.read(position)
        places = position.streams or ((0, 0, 0),) * 16
        moved = zip(places, after.streams, strict=True)
        ((epoch, _, _),) = (before for before, place in moved if before != place)
        seen[epoch].update(pairs_in(batch))
        position = after
    once = Counter(pair for corpus in corpora for pair in all_pairs(corpus))
    assert seen[:3] == [once] * 3


def test_a_position_in_other_data_is_refused():
    stream = TrainingStream([random_pairs(40)], config(rows=4))
    with pytest.raises(UserError, match=r"begin with DataPosition\(epoch=2\)"):
        stream.read(DataPosition(epoch=1, streams=((1, 0, 0), (1, 0, 0))))


# The length of source rows.


def natural_pairs(mean, deviation, ratio):
    random = np.random.default_rng(0)
    targets = random.gamma((mean / deviation) ** 2, deviation**2 / mean, 10_000)
    sources = ratio * targets + random.normal(0, 0.5 * deviation, 10_000)
    lengths = np.stack([sources, targets], axis=1).round().astype(int)
    return pairs_of_lengths(np.clip(lengths, 2, 64))


@pytest.mark.parametrize(("ratio", "multiple"), [(0.7, 1), (0.87, 8), (1.0, 8), (1.3, 4)])
def test_source_and_target_rows_are_filled_equally(ratio, multiple, monkeypatch):
    monkeypatch.setattr(mixture, "SINGLE_BLOCK_PAIRS", 65_536)
    corpus = natural_pairs(12, 4.5, ratio)
    setting = config(source_row_length=0, target_row_length=64)
    length = choose_source_row_length([corpus], setting)
    assert length % multiple == 0
    chosen = config(source_row_length=length, target_row_length=64)
    assert min(TrainingStream([corpus], chosen).fill) >= 0.95
