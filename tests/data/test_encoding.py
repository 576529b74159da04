import dataclasses

import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig, TrainConfig, TransformerConfig
from flaxformer_mt.data.corpus import ParallelCorpus
from flaxformer_mt.data.encoding import encode_corpus
from flaxformer_mt.data.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

# One digit, one piece; rows take four digits and the end token.
CORPUS = ParallelCorpus(
    sources=["1 2", "", "1 2 3 4 5", "7", "1 2 3 4", " "],
    targets=["2 1", "9", "5 4 3 2 1", "", "4 3 2 1", "8"],
    name="digits",
)
DATA = DataConfig(source_row_length=5, target_row_length=5)
CONFIG = ExperimentConfig(data=DATA, train=TrainConfig(batch_tokens=20))
TOKENIZERS = Tokenizers.train(CORPUS, DATA)


def with_policy(policy):
    return dataclasses.replace(CONFIG, data=dataclasses.replace(DATA, long_sentences=policy))


def texts(sentences):
    """The texts of encoded sentences, each of which must end with the end token."""
    stored = [sentences[index].tolist() for index in range(len(sentences))]
    assert all(tokens.index(2) == len(tokens) - 1 for tokens in stored)
    return TOKENIZERS.source.decode(stored)


def test_empty_and_long_pairs_are_dropped_and_counted():
    encoded = encode_corpus(CORPUS, TOKENIZERS, with_policy("drop"))
    assert texts(encoded.sources) == ["1 2", "1 2 3 4"]
    assert texts(encoded.targets) == ["2 1", "4 3 2 1"]
    report = encoded.report
    assert (report.pairs, report.kept) == (6, 2)
    assert (report.empty, report.dropped, report.truncated) == (3, 1, 0)
    assert (report.source_tokens, report.target_tokens) == (8, 8)
    assert str(report) == (
        "digits: 2 of 6 pairs kept (3 with an empty side and 1 longer than a row dropped, "
        "0 truncated); 8 source and 8 target tokens, 0.00% unknown"
    )


def test_long_pairs_are_truncated_and_still_end():
    encoded = encode_corpus(CORPUS, TOKENIZERS, with_policy("truncate"))
    assert texts(encoded.sources) == ["1 2", "1 2 3 4", "1 2 3 4"]
    assert texts(encoded.targets) == ["2 1", "5 4 3 2", "4 3 2 1"]
    assert (encoded.report.dropped, encoded.report.truncated) == (0, 1)


def test_long_pairs_are_an_error_if_so_wished():
    with pytest.raises(UserError, match=r"digits: 1 of 6 pairs .*source_row_length=5.* pair 3;"):
        encode_corpus(CORPUS, TOKENIZERS, with_policy("error"))


def test_no_pair_is_left():
    corpus = ParallelCorpus(["1", ""], ["", "1"], "halves")
    with pytest.raises(UserError, match="halves: none of 2 pairs is left; 2 have an empty side"):
        encode_corpus(corpus, TOKENIZERS, CONFIG)


def test_language_model_has_targets_only():
    config = dataclasses.replace(CONFIG, model=TransformerConfig(has_inputs=False))
    encoded = encode_corpus(CORPUS, TOKENIZERS, config)
    assert encoded.sources is None
    assert texts(encoded.targets) == ["2 1", "9", "4 3 2 1", "8"]
    assert encoded.report.source_tokens == 0


def test_unknown_tokens_are_counted():
    tokenizers = Tokenizers.train(CORPUS, dataclasses.replace(DATA, byte_fallback=False))
    encoded = encode_corpus(ParallelCorpus(["1 x"], ["1"], "letters"), tokenizers, CONFIG)
    assert encoded.report.unknown_tokens == 1
    assert encoded.report.unknown_rate == 1 / (encoded.report.source_tokens + 2)


def test_special_ids_must_be_those_of_the_tokenizer():
    config = dataclasses.replace(CONFIG, model=TransformerConfig(pad_id=5))
    with pytest.raises(UserError, match=r"model\.pad_id=5, but the tokenizer's is 0"):
        encode_corpus(CORPUS, TOKENIZERS, config)
    start_from_zero = dataclasses.replace(CONFIG, model=TransformerConfig(bos_id=-1))
    encode_corpus(CORPUS, TOKENIZERS, start_from_zero)
