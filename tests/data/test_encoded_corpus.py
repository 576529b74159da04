import dataclasses

import numpy as np

from flaxformer_mt.config import DataConfig, TransformerConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus
from flaxformer_mt.data.corpora.rows import Dropped
from flaxformer_mt.data.stream.encoded_corpus import CorpusReport, SideReport, encode_corpus
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

# One digit, one piece.
CORPUS = ParallelCorpus(
    sources=["1 2", "", "1 2 3 4 5", "7", " "],
    targets=["2 1", "9", "5 4 3 2 1", "", "8"],
    name="digits",
)
MODEL = TransformerConfig()
TOKENIZERS = Tokenizers.train([CORPUS], DataConfig())
WITHOUT_BYTES = Tokenizers.train([CORPUS], DataConfig(byte_fallback=False))


def texts(sentences):
    """Decodes sentences, each of which must end with the end token."""
    stored = [sentences[index].tolist() for index in range(len(sentences))]
    assert all(tokens.index(2) == len(tokens) - 1 for tokens in stored)
    return TOKENIZERS.source.decode(stored)


def test_the_report_describes_both_sides():
    report = encode_corpus(CORPUS, TOKENIZERS, MODEL).report
    assert report.pairs == report.kept == 5
    assert report.sources == SideReport(13, 2.6, 6, 6, 0)
    assert report.targets == SideReport(14, 2.8, 6, 6, 0)
    assert str(report) == "5 pairs; 13 source and 14 target tokens, 0.00% unknown"


def test_a_language_model_has_targets_only():
    encoded = encode_corpus(CORPUS, TOKENIZERS, TransformerConfig(has_inputs=False))
    assert encoded.sources is None
    assert texts(encoded.targets) == CORPUS.targets
    assert str(encoded.report) == "5 pairs; 14 target tokens, 0.00% unknown"


def test_unknown_tokens_are_counted_and_the_first_character_is_kept():
    corpus = ParallelCorpus(["1", "2 猫 3", "x"], ["1", "2", "3"], "letters")
    report = encode_corpus(corpus, WITHOUT_BYTES, MODEL).report
    assert (report.sources.unknown_tokens, report.sources.unknown_example) == (2, "猫")
    assert report.sources.unknown_rate == 2 / report.sources.tokens
    assert (report.targets.unknown_tokens, report.targets.unknown_example) == (0, "")


REPORT = CorpusReport(
    pairs=1000,
    dropped={"empty side": Dropped(20, "pair 3: a | ")},
    sources=SideReport(5000, 5.1, 9, 1200, 50, "猫"),
    targets=SideReport(6000, 6.1, 11, 40, 0),
)


def test_details_list_dropped_pairs_and_lengths():
    assert REPORT.details() == [
        "980 of 1,000 pairs kept (20 empty side dropped)",
        "empty side: 20, the first is pair 3: a | ",
        "source: 5,000 tokens, 5.1 per sentence, 95% at most 9, longest 1,200; "
        "1.00% unknown, such as '猫'",
        "target: 6,000 tokens, 6.1 per sentence, 95% at most 11, longest 40; 0.00% unknown",
    ]


def test_reports_describe_the_pairs_that_fit_into_rows():
    corpus = encode_corpus(
        ParallelCorpus(["1 2", "1 猫 2 3 4", "3"], ["1", "2", "5 6 7 8"], "digits"),
        WITHOUT_BYTES,
        MODEL,
    )
    assert corpus.report.sources.unknown_tokens == 1
    report = corpus.without("longer than a row", "a.tsv, line 7", np.array([1, 2])).report
    assert (report.kept, report.sources, report.targets) == (
        1,
        SideReport(3, 3.0, 3, 3, 0, "猫"),
        SideReport(2, 2.0, 2, 2, 0, "6"),
    )
    assert report.details()[1] == "longer than a row: 2, the first is a.tsv, line 7"
    cut = dataclasses.replace(REPORT, truncated=30)
    assert cut.kept == 980
    assert str(cut).startswith("980 of 1,000 pairs kept (20 empty side dropped, 30 truncated); ")
