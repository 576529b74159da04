"""Word alignments: from their file through filters and packing into the rows of batches."""

import dataclasses
import gzip

import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.config import CorpusConfig, DataConfig, ExperimentConfig, TransformerConfig
from flaxformer_mt.data.dataset import open_all
from flaxformer_mt.data.stream.batches import DataPosition
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.stream.training_stream import TrainingStream
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers, words
from flaxformer_mt.errors import UserError

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def number_pairs(count):
    """Numbers in words and the same in reverse, whose links are known from the words."""
    random = np.random.default_rng(0)
    for _ in range(count):
        source = [WORDS[index] for index in random.permutation(10)[: random.integers(1, 7)]]
        yield " ".join(source), " ".join(word[::-1] for word in reversed(source))


def links_of(source):
    count = len(source.split())
    return " ".join(f"{word}-{count - 1 - word}" for word in range(count))


def write(folder, pairs, lines, name="train.align"):
    folder.mkdir(exist_ok=True)
    for language, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"train.{language}").write_text("\n".join(texts) + "\n")
    path = folder / name
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def configuration(folder, path, model=None, **data):
    data = {
        "vocab_size": 280,
        "source_row_length": 40,
        "target_row_length": 32,
        "valid_corpora": (CorpusConfig(kind="text", split="train"),),
        "test_split": "",
        **data,
    }
    return ExperimentConfig(
        model=model or TransformerConfig(),
        data=DataConfig(path=str(folder), alignments=str(path), **data),
    )


def opened(folder, config):
    corpora = open_all(config)
    tokenizers = Tokenizers.for_run(corpora["train"], config.data)
    return open_stores(folder / "cache", corpora["train"], tokenizers, config), tokenizers


def check_batches(stream, tokenizers, count):
    """Checks that linked tokens belong to a word and its reverse, and all tokens are linked."""
    position, linked = DataPosition(), 0
    for _ in range(count):
        batch, position = stream.read(position)
        assert batch.alignment.shape == (
            *batch.decoder_input_tokens.shape, batch.encoder_input_tokens.shape[1]
        )  # fmt: skip
        assert batch.alignment.dtype == np.float32
        for row in range(len(batch.alignment)):
            for segment in range(1, batch.decoder_segment_ids[row].max() + 1):
                columns = batch.encoder_segment_ids[row] == segment
                lines = batch.decoder_segment_ids[row] == segment
                # The last token of each side is the end token.
                source = batch.encoder_input_tokens[row, columns][:-1].tolist()
                target = batch.decoder_target_tokens[row, lines][:-1].tolist()
                sides = [
                    np.array(words(tokenizer.pieces(tokens)))
                    for tokenizer, tokens in (
                        (tokenizers.source, source), (tokenizers.target, target),
                    )
                ]  # fmt: skip
                expected = np.zeros((len(target) + 1, len(source) + 1), np.float32)
                expected[:-1, :-1] = sides[0][None] == sides[0][-1] - sides[1][:, None]
                expected /= np.maximum(expected.sum(axis=1, keepdims=True), 1)
                found = batch.alignment[row]
                np.testing.assert_array_equal(found[np.ix_(lines, columns)], expected)
                assert not found[np.ix_(lines, ~columns)].any()
                linked += len(target)
            assert not batch.alignment[row, batch.decoder_segment_ids[row] == 0].any()
    assert linked > 100


@pytest.mark.slow_except("train.align")
@pytest.mark.parametrize("name", ["train.align", "train.align.gz"])
def test_links_survive_filters_hold_out_duplicates_and_packing(tmp_path, name):
    pairs = list(number_pairs(400))
    pairs[7] = ("", "leer")  # Is dropped.
    lines = [links_of(source) for source, _ in pairs]
    path = write(tmp_path / "text", pairs, lines, name)
    config = configuration(
        tmp_path / "text", path, hold_out=40, valid_corpora=(), test_split="test",
        max_words=5, drop_duplicates=True,
    )  # fmt: skip
    stores, tokenizers = opened(tmp_path, config)
    (store,) = stores
    assert {"more than 5 words", "duplicate", "empty side"} <= store.report.dropped.keys()
    config = dataclasses.replace(
        config, model=TransformerConfig(source_vocab_size=280, target_vocab_size=280)
    )
    check_batches(TrainingStream(stores, config), tokenizers, 6)
    # The store is read again.
    check_batches(TrainingStream(opened(tmp_path, config)[0], config), tokenizers, 1)


def test_links_of_truncated_tokens_are_left_out(tmp_path):
    pairs = list(number_pairs(100))
    path = write(tmp_path / "text", pairs, [links_of(source) for source, _ in pairs])
    config = configuration(
        tmp_path / "text", path, source_row_length=8, target_row_length=8,
        long_sentences="truncate",
    )  # fmt: skip
    stores, _ = opened(tmp_path, config)
    batch, _ = TrainingStream(stores, config).read(DataPosition())
    assert batch.alignment.any()
    ends = batch.encoder_input_tokens == config.model.eos_id
    assert not batch.alignment[np.broadcast_to(ends[:, None], batch.alignment.shape)].any()
    assert not batch.alignment[batch.decoder_target_tokens == config.model.eos_id].any()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["0-0"], r"train.align has 1 lines, but .*train.en and .* has 2 pairs: each line"),
        (["0-0", "", "0-0"], r"train.align has 3 lines, but .* has 2 pairs"),
        (["0-0", "0-0 1-2"], r"train.align, line 2: the link 1-2 is beyond the words, 2 of the"),
        (["0-0", "2-0"], r"train.align, line 2: the link 2-0 is beyond the words"),
        (["0-0", "0-0 1:1"], r"train.align, line 2: '1:1' is not a link: the numbers of a source"),
        (["0-0", "-1-0"], r"train.align, line 2: '-1-0' is not a link"),
    ],
)
def test_an_alignment_file_that_does_not_fit_is_refused(tmp_path, lines, error):
    path = write(tmp_path / "text", [("one", "eno"), ("one two", "eno owt")], lines)
    config = configuration(tmp_path / "text", path)
    with pytest.raises(UserError, match=error):
        opened(tmp_path, config)


def test_options_that_alignments_cannot_be_used_with(tmp_path):
    pairs = [("one two", "eno owt")]
    path = write(tmp_path / "text", pairs, ["0-1 1-0"])
    with pytest.raises(UserError, match=r"data\.subword_sampling=0\.1 cannot be used with align"):
        opened(tmp_path, configuration(tmp_path / "text", path, subword_sampling=0.1))
    with pytest.raises(UserError, match=r"data\.alignments=a are of one corpus of files"):
        DataConfig(alignments="a", corpus="reverse")
    with pytest.raises(UserError, match=r"data\.alignments=a are of one corpus of files"):
        DataConfig(alignments="a", train_corpora=(CorpusConfig(path="b"),))
    with pytest.raises(UserError, match=r"data\.alignments=missing is not a file"):
        open_all(configuration(tmp_path / "text", "missing"))
    languages = {"source_language": "en", "target_language": "de"}
    with pytest.raises(UserError, match=r"alignments=.* counts the words of sources"):
        fmt.read_pairs(tmp_path / "text", **languages, tag="<2de>", alignments=path)
    aligned = fmt.read_pairs(tmp_path / "text", **languages, alignments=path)
    plain = fmt.read_pairs(tmp_path / "text", **languages)
    tokenizers = fmt.train_tokenizers(plain, size=280)
    config = TransformerConfig(**tokenizers.fields)
    data = fmt.packed(aligned, tokenizers, config, rows=2, length=16, cache=tmp_path)
    assert data.read(data.start)[0].alignment.any()
    with pytest.raises(UserError, match="either all corpora"):
        fmt.packed([aligned, plain], tokenizers, config, rows=2, length=16, cache=tmp_path)
