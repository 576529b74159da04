import dataclasses

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.stream.batches import (
    BatchShape,
    Shard,
    make_batch,
    packed_shape,
    whole_batches,
)
from flaxformer_mt.data.stream.packing import Sentences, TokenPairs
from flaxformer_mt.errors import UserError
from tests.data.pairs import all_pairs, encoded, pairs_in, pairs_of_lengths

MODEL = TransformerConfig(pad_id=9, bos_id=1, eos_id=2)
SOURCES, TARGETS = [[5, 2], [6, 7, 2]], [[15, 16, 2], [17, 2]]
CONFIG = ExperimentConfig(
    data=DataConfig(source_row_length=12, target_row_length=10), train=TrainConfig(batch_tokens=40)
)


def shape_of(batch):
    return BatchShape(*batch.encoder_input_tokens.shape, batch.decoder_target_tokens.shape[1])


def test_literal_batch():
    sides = Sentences.from_lists(SOURCES), Sentences.from_lists(TARGETS)
    batch = make_batch(TokenPairs(*sides), [[1, 0]], BatchShape(2, 6, 7), MODEL)
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


def test_evaluation_batches_contain_every_pair_once_in_one_shape():
    random = np.random.default_rng(0)
    corpus = pairs_of_lengths(random.integers(2, 10, (50, 2)))
    batches = whole_batches(corpus, CONFIG)
    assert sorted(pair for batch in batches for pair in pairs_in(batch)) == all_pairs(corpus)
    assert {shape_of(batch) for batch in batches} == {packed_shape(CONFIG)}


def test_evaluation_does_not_truncate_long_pairs():
    long = [(13, 4), (4, 11), (16, 16), (17, 5), (100, 5_000)]
    corpus = pairs_of_lengths([(3, 4), *long, (5, 6)])
    batches = whole_batches(corpus, CONFIG)
    assert sorted(pair for batch in batches for pair in pairs_in(batch)) == all_pairs(corpus)
    # At most as many attention weights as 4 rows of 12 x 10, but at least one row.
    assert [shape_of(batch) for batch in batches] == [
        BatchShape(4, 12, 10),
        BatchShape(1, 16, 16),
        BatchShape(1, 16, 16),
        BatchShape(1, 16, 16),
        BatchShape(1, 32, 32),
        BatchShape(1, 8192, 8192),
    ]


def test_evaluation_rows_are_no_longer_than_the_learned_positions():
    model = TransformerConfig(position_kind="learned", max_length=20)
    config = dataclasses.replace(CONFIG, model=model)
    corpus = pairs_of_lengths([(3, 4), (17, 5), (20, 20)])
    batches = whole_batches(corpus, config)
    assert sorted(pair for batch in batches for pair in pairs_in(batch)) == all_pairs(corpus)
    assert max(shape_of(batch) for batch in batches[1:]) == BatchShape(1, 20, 20)
    too_long = pairs_of_lengths([(3, 4), (21, 5)])
    with pytest.raises(UserError, match=r"pair 2 has 21 tokens .*model\.max_length=20"):
        whole_batches(too_long, config)
    short = dataclasses.replace(model, max_length=11)
    with pytest.raises(UserError, match=r"rows of 12 source and 10 .*model\.max_length=11: set"):
        whole_batches(corpus, dataclasses.replace(config, model=short))


@pytest.mark.parametrize("row_shards", [1, 2, 4])
def test_evaluation_batches_can_be_sharded(row_shards):
    config = dataclasses.replace(CONFIG, train=TrainConfig(batch_tokens=160))
    corpus = pairs_of_lengths([(3, 4), (13, 4), (20, 3), (200, 3)])
    batches = whole_batches(corpus, config, row_shards)
    assert len(batches) > 1
    for batch in batches:
        assert shape_of(batch).rows % row_shards == 0
    shards = [
        whole_batches(corpus, config, row_shards, Shard(index, row_shards))
        for index in range(row_shards)
    ]
    for parts, batch in zip(zip(*shards, strict=True), batches, strict=True):
        joined = np.concatenate([part.encoder_input_tokens for part in parts])
        assert joined.tolist() == batch.encoder_input_tokens.tolist()


def test_language_model_batches_have_no_encoder_side():
    corpus = encoded(None, [[15, 16, 2], [17, 2], [18] * 20 + [2]])
    batches = whole_batches(corpus, CONFIG)
    assert sum(np.count_nonzero(batch.decoder_target_tokens == 2) for batch in batches) >= 2
    for batch in batches:
        assert batch.encoder_input_tokens is None
        assert batch.encoder_segment_ids is None
        assert batch.encoder_positions is None
        assert 0 < batch.decoder_loss_weights.mean() < 1
