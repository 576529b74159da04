import chex
import numpy as np
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.batches import (
    BatchLayout,
    TrainingBatches,
    evaluation_batches,
    make_batch,
    padding_fraction,
)
from flaxformer_mt.data.encoding import CorpusReport, EncodedCorpus
from flaxformer_mt.data.packing import Sentences

LAYOUT = BatchLayout(rows=4, source_row_length=12, target_row_length=10, pad_id=0, bos_id=1)


def encoded(sources, targets):
    sides = (
        (None if sources is None else Sentences.from_lists(sources)),
        Sentences.from_lists(targets),
    )
    return EncodedCorpus(*sides, CorpusReport("made up", len(targets), 0, 0, 0, 0, 0, 0))


def numbered_pairs(count, seed=0):
    """Pair i has source 10 + i, repeated, and target 1010 + i, repeated, each ended by 2."""
    rng = np.random.default_rng(seed)
    sources = [[10 + i] * length + [2] for i, length in enumerate(rng.integers(1, 9, count))]
    targets = [[1010 + i] * length + [2] for i, length in enumerate(rng.integers(1, 8, count))]
    return encoded(sources, targets)


def rows_of(batch):
    """The rows of a batch, each a list of the (source tokens, target tokens) of its segments."""
    return [
        [
            (
                tuple(batch.encoder_input_tokens[row][source_segments == number].tolist()),
                tuple(batch.decoder_target_tokens[row][target_segments == number].tolist()),
            )
            for number in range(1, target_segments.max() + 1)
        ]
        for row, (source_segments, target_segments) in enumerate(
            zip(batch.encoder_segment_ids, batch.decoder_segment_ids, strict=True)
        )
    ]


def first_rows(stream, count):
    """The first `count` rows of a stream of batches."""
    rows = []
    while len(rows) < count:
        rows += rows_of(stream.batch(len(rows) // LAYOUT.rows))
    return rows[:count]


def pairs_of(corpus):
    return [
        (tuple(corpus.sources[i].tolist()), tuple(corpus.targets[i].tolist()))
        for i in range(len(corpus.targets))
    ]


def test_literal_batch():
    corpus = encoded([[5, 2], [6, 7, 2]], [[15, 16, 2], [17, 2]])
    layout = BatchLayout(rows=2, source_row_length=6, target_row_length=7, pad_id=9, bos_id=1)
    batch = make_batch(corpus, [np.array([1, 0])], layout)
    literal = {
        "encoder_input_tokens": [[6, 7, 2, 5, 2, 9], [9] * 6],
        "decoder_input_tokens": [[1, 17, 1, 15, 16, 9, 9], [9] * 7],
        "decoder_target_tokens": [[17, 2, 15, 16, 2, 9, 9], [9] * 7],
        "decoder_loss_weights": [[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0.0] * 7],
        "encoder_segment_ids": [[1, 1, 1, 2, 2, 0], [0] * 6],
        "decoder_segment_ids": [[1, 1, 2, 2, 2, 0, 0], [0] * 7],
        "encoder_positions": [[0, 1, 2, 0, 1, 0], [0] * 6],
        "decoder_positions": [[0, 1, 0, 1, 2, 0, 0], [0] * 7],
    }
    for name, values in literal.items():
        array = getattr(batch, name)
        assert array.tolist() == values, name
        assert array.dtype == (np.float32 if name == "decoder_loss_weights" else np.int32), name


def test_padding_fraction_counts_both_sides():
    corpus = encoded([[5, 2], [6, 7, 2]], [[15, 16, 2], [17, 2]])
    batch = make_batch(corpus, [np.array([0, 1])], LAYOUT)
    assert padding_fraction(batch) == pytest.approx(1 - 10 / (4 * 22))


def test_batch_is_a_pure_function_of_seed_and_step():
    corpus = numbered_pairs(50)
    stream = TrainingBatches(corpus, LAYOUT, seed=7)
    in_order = [stream.batch(step) for step in range(20)]
    for step in (19, 3, 11, 0):
        fresh = TrainingBatches(corpus, LAYOUT, seed=7)
        chex.assert_trees_all_equal(fresh.batch(step), in_order[step])
        chex.assert_trees_all_equal(stream.batch(step), in_order[step])
    other = TrainingBatches(corpus, LAYOUT, seed=8).batch(0)
    assert (other.decoder_target_tokens != in_order[0].decoder_target_tokens).any()


def test_all_batches_have_one_shape():
    stream = TrainingBatches(numbered_pairs(50), LAYOUT, seed=0)
    for step in range(30):
        chex.assert_trees_all_equal_shapes_and_dtypes(stream.batch(step), stream.batch(0))


@pytest.mark.parametrize("count", [1, 3, 50, 51])
def test_every_pair_comes_once_an_epoch(count):
    corpus = numbered_pairs(count)
    stream = TrainingBatches(corpus, LAYOUT, seed=0)
    # Nearly all of these epochs end inside of a batch.
    rows = first_rows(stream, 3 * stream.rows_per_epoch)
    for epoch in range(3):
        part = rows[epoch * stream.rows_per_epoch : (epoch + 1) * stream.rows_per_epoch]
        assert sorted(pair for row in part for pair in row) == sorted(pairs_of(corpus))


def test_epochs_differ_in_order_and_neighbours():
    stream = TrainingBatches(numbered_pairs(200), LAYOUT, seed=0)
    rows = first_rows(stream, 2 * stream.rows_per_epoch)
    first, second = rows[: stream.rows_per_epoch], rows[stream.rows_per_epoch :]
    assert first != second
    shared = [set(row) for row in first if len(row) > 1]
    kept_together = [row for row in second if set(row) in shared]
    assert len(kept_together) < len(shared) / 5


def test_fill_is_the_share_of_target_positions_in_use():
    corpus = numbered_pairs(200)
    stream = TrainingBatches(corpus, LAYOUT, seed=0)
    tokens = sum(
        int(stream.batch(step).decoder_loss_weights.sum()) for step in range(stream.rows_per_epoch)
    )
    assert stream.fill == pytest.approx(tokens / (stream.rows_per_epoch * LAYOUT.rows * 10))
    assert stream.fill > 0.8


def test_evaluation_batches_hold_every_pair_once_in_one_shape():
    corpus = numbered_pairs(50)
    batches = evaluation_batches(corpus, LAYOUT)
    pairs = [pair for batch in batches for row in rows_of(batch) for pair in row]
    assert sorted(pairs) == sorted(pairs_of(corpus))
    for batch in batches:
        chex.assert_shape(batch.encoder_input_tokens, (4, 12))
        chex.assert_shape(batch.decoder_target_tokens, (4, 10))


def test_last_evaluation_batch_is_filled_up_with_empty_rows():
    # Five rows of two pairs each.
    corpus = encoded([[5, 5, 5, 2]] * 10, [[6, 6, 6, 6, 2]] * 10)
    batches = evaluation_batches(corpus, LAYOUT)
    assert [batch.decoder_loss_weights.sum(axis=1).tolist() for batch in batches] == [
        [10, 10, 10, 10],
        [10, 0, 0, 0],
    ]


def test_language_model_batches_have_no_encoder_side():
    corpus = encoded(None, [[15, 16, 2], [17, 2], [18, 2]])
    for batch in (
        TrainingBatches(corpus, LAYOUT, 0).batch(0),
        evaluation_batches(corpus, LAYOUT)[0],
    ):
        assert batch.encoder_input_tokens is None
        assert batch.encoder_segment_ids is None
        assert batch.encoder_positions is None
        chex.assert_shape(batch.decoder_input_tokens, (4, 10))
        assert 0 < padding_fraction(batch) < 1


def test_layout_from_configuration():
    config = ExperimentConfig(
        model=TransformerConfig(bos_id=-1),
        data=DataConfig(source_row_length=30, target_row_length=40),
        train=TrainConfig(batch_tokens=400),
    )
    assert BatchLayout.from_config(config) == BatchLayout(10, 30, 40, pad_id=0, bos_id=-1)
