import concurrent.futures
import dataclasses
import json
import logging

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.config.experiment import values_with
from flaxformer_mt.config.fields import FieldRole
from flaxformer_mt.data.corpora.corpus import Corpus, ParallelCorpus
from flaxformer_mt.data.stream import store_parts, token_store
from flaxformer_mt.data.stream.encoded_corpus import encode_corpus
from flaxformer_mt.data.stream.token_store import open_stores
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError

CORPUS = ParallelCorpus(
    ["one", "two three", "", "four", "one", "six " * 60], ["a", "b c", "d", "e f g", "a", "h"], "A"
)
OTHER = ParallelCorpus(["seven", "one", "eight"], ["i", "a", "j"], "B", weight=3.0)
CONFIG = ExperimentConfig()
TOKENIZERS = Tokenizers.train([CORPUS, OTHER], CONFIG.data)


def with_data(**options):
    return dataclasses.replace(CONFIG, data=DataConfig(**options))


def texts(sentences, tokenizer=TOKENIZERS.source):
    return tokenizer.decode([sentences[index].tolist() for index in range(len(sentences))])


def stores_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


class Refusing(Corpus):
    """A copy of a corpus that cannot be read."""

    def __init__(self, corpus, error=None):
        self.name, self.languages = corpus.name, corpus.languages
        self.tag, self.weight = corpus.tag, corpus.weight
        self._corpus, self._error = corpus, error

    @property
    def fingerprint(self):
        return self._corpus.fingerprint

    def pairs(self):
        yield from list(self._corpus.pairs())[:2]
        raise self._error or AssertionError("the corpus was read again")


def test_a_store_contains_the_tokens_of_the_kept_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(store_parts, "ROWS", 2)
    (stored,) = open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    kept = ParallelCorpus(
        [text for text in CORPUS.sources if text], ["a", "b c", "e f g", "a", "h"], "A"
    )
    wanted = encode_corpus(kept, TOKENIZERS, CONFIG.model)
    for side in ("sources", "targets"):
        np.testing.assert_array_equal(getattr(stored, side).tokens, getattr(wanted, side).tokens)
        np.testing.assert_array_equal(getattr(stored, side).offsets, getattr(wanted, side).offsets)
    assert stored.report.pairs == 6
    assert stored.report.dropped["empty side"].count == 1
    assert stored.report.targets == wanted.report.targets
    assert not stored.fields
    assert not stored.targets.tokens.flags.owndata


def test_a_store_is_reused_without_reading_the_corpus(tmp_path, caplog):
    (made,) = open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    (again,) = open_stores(tmp_path, [Refusing(CORPUS)], TOKENIZERS, CONFIG)
    assert again.report == made.report
    np.testing.assert_array_equal(again.sources.tokens, made.sources.tokens)
    assert not caplog.records


@pytest.mark.parametrize(
    ("corpus", "tokenizers", "config", "changed"),
    [
        (OTHER, TOKENIZERS, CONFIG, "the text"),
        (CORPUS, Tokenizers.train([OTHER], CONFIG.data), CONFIG, "the tokenizer"),
        (CORPUS, TOKENIZERS, with_data(subword_sampling=0.1), "data.subword_sampling"),
        (CORPUS, TOKENIZERS, with_data(max_words=5), "data.max_words"),
        (CORPUS, TOKENIZERS, with_data(drop_duplicates=True), "data.drop_duplicates"),
    ],
)
def test_a_change_is_detected_and_reported(tmp_path, caplog, corpus, tokenizers, config, changed):
    open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    (changed_store,) = open_stores(tmp_path, [corpus], tokenizers, config)
    (line,) = caplog.messages
    assert line.endswith(f"{changed} changed")
    (fresh,) = open_stores(tmp_path / "fresh", [corpus], tokenizers, config)
    np.testing.assert_array_equal(changed_store.sources.tokens, fresh.sources.tokens)
    assert changed_store.report == fresh.report


def changed_option(name, value):
    """The default experiment with another valid value of an option of the store."""
    group, field = name.split(".")
    new = not value if isinstance(value, bool) else type(value)(value + 1)
    options = {field: new, "tie_embeddings": "target_output"} if group == "model" else {field: new}
    return dataclasses.replace(
        CONFIG, **{group: dataclasses.replace(getattr(CONFIG, group), **options)}
    )


@pytest.mark.parametrize(("name", "value"), values_with(CONFIG, FieldRole.TOKENS).items())
def test_every_filter_option_makes_a_new_store(tmp_path, caplog, name, value):
    corpus = dataclasses.replace(CORPUS, languages=("en", "de"))
    open_stores(tmp_path, [corpus], TOKENIZERS, CONFIG)
    open_stores(tmp_path, [corpus], TOKENIZERS, changed_option(name, value))
    (line,) = caplog.messages
    assert line.endswith(f"{name} changed")


class Recorder:
    """A configuration that records which of its options are read."""

    def __init__(self, config, read, prefix=""):
        self._config, self._read, self._prefix = config, read, prefix

    def __getattr__(self, name):
        value = getattr(self._config, name)
        if dataclasses.is_dataclass(value):
            return Recorder(value, self._read, f"{name}.")
        self._read.add(self._prefix + name)
        return value


def test_a_store_depends_on_no_option_outside_its_key(tmp_path):
    read = set()
    corpus = dataclasses.replace(CORPUS, languages=("en", "de"))
    filters = {
        "max_length_ratio": 9.0,
        "max_words": 90,
        "drop_identical": True,
        "drop_duplicates": True,
        "drop_wrong_script": True,
        "subword_sampling": 0.1,
    }
    open_stores(tmp_path, [corpus], TOKENIZERS, Recorder(with_data(**filters), read))
    key = json.loads((tmp_path / "train-0" / "store.json").read_text())["origin"]["options"]
    # The special ids are only compared with the tokenizer's, whose fingerprint is in the key.
    vocabulary = values_with(CONFIG, FieldRole.VOCABULARY).keys()
    assert filters.keys() <= {name.removeprefix("data.") for name in read}
    assert read <= key.keys() | vocabulary


@pytest.mark.parametrize(
    "name",
    [
        "source.tokens", "source.offsets", "target.tokens", "target.offsets", "text.values",
        "text.offsets", "seen.hashes", "store.json", "manifest.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("position", [1, -4])
def test_a_flipped_bit_rebuilds_a_store(tmp_path, caplog, name, position):
    config = with_data(drop_duplicates=True, subword_sampling=0.1)
    (made,) = open_stores(tmp_path, [CORPUS], TOKENIZERS, config)
    files = {path.name: path.read_bytes() for path in (tmp_path / "train-0").iterdir()}
    content = bytearray(files[name])
    content[position] ^= 1
    (tmp_path / "train-0" / name).write_bytes(content)
    (again,) = open_stores(tmp_path, [CORPUS], TOKENIZERS, config)
    (line,) = caplog.messages
    assert line.startswith("A is filtered and tokenized again")
    assert name in line or name == "manifest.json"
    assert again.report == made.report
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "train-0").iterdir()}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("line 3 is damaged")])
def test_an_interruption_leaves_no_store(tmp_path, monkeypatch, error):
    monkeypatch.setattr(store_parts, "ROWS", 1)
    with pytest.raises(type(error)):
        open_stores(tmp_path, [Refusing(CORPUS, error)], TOKENIZERS, CONFIG)
    assert stores_in(tmp_path) == ["parts-0"]
    open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    assert stores_in(tmp_path) == ["train-0"]


def test_superfluous_stores_are_removed_and_nothing_else(tmp_path):
    open_stores(tmp_path, [CORPUS, OTHER], TOKENIZERS, CONFIG)
    for name in ("train-7", "train-data", "train-0.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "foreign").touch()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "train-1").rename(elsewhere)
    (tmp_path / "train-8").symlink_to(elsewhere)
    (tmp_path / "train-9").touch()
    open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    assert stores_in(tmp_path) == [
        "elsewhere", "train-0", "train-0.partial", "train-7", "train-9", "train-data",
    ]  # fmt: skip
    assert (elsewhere / "store.json").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_something_else_in_place_of_a_store_is_not_replaced(tmp_path, kind):
    path = tmp_path / "train-0"
    if kind == "file":
        path.write_text("foreign")
    else:
        folder = tmp_path / "elsewhere" if kind == "link" else path
        folder.mkdir()
        (folder / "kept").write_text("foreign")
        if kind == "link":
            path.symlink_to(folder)
    with pytest.raises(UserError, match="train-0 is not a token store: move it elsewhere"):
        open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    assert (path if kind == "file" else path / "kept").read_text() == "foreign"


def test_two_runs_that_start_at_once_share_a_folder(tmp_path):
    """Each gets its own tokens, although the other one replaces the store."""
    cached, linked = tmp_path / "cache", tmp_path / "linked"
    cached.mkdir()
    linked.symlink_to(cached)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        opened = [
            pool.submit(open_stores, folder, [corpus], TOKENIZERS, CONFIG)
            for folder, corpus in ((cached, CORPUS), (linked, OTHER)) * 4
        ]
        sources = [texts(future.result()[0].sources) for future in opened]
    alone = [
        texts(open_stores(tmp_path / corpus.name, [corpus], TOKENIZERS, CONFIG)[0].sources)
        for corpus in (CORPUS, OTHER)
    ]
    assert sources == alone * 4
    assert stores_in(cached) == ["train-0"]


def test_a_full_disk_raises_a_user_error(tmp_path, monkeypatch):
    def fail(path, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store, "_append", fail)
    with pytest.raises(UserError, match=r"train-0 cannot be written: No space"):
        open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    assert stores_in(tmp_path) == []


def test_duplicates_are_found_across_corpora(tmp_path, caplog):
    config = with_data(drop_duplicates=True)
    first, second = open_stores(tmp_path, [CORPUS, OTHER], TOKENIZERS, config)
    assert first.report.dropped["duplicate"].count == 1
    assert texts(second.sources) == ["seven", "eight"]

    # With another tag it is another pair.
    tagged = ParallelCorpus(
        ["<x> two three", "<x> one", "<x> one"], ["b c", "a", "a"], "C", tag="<x>"
    )
    _, third = open_stores(tmp_path / "tagged", [CORPUS, tagged], TOKENIZERS, config)
    assert texts(third.sources) == tagged.sources[:2]

    # The second store also depends on the first corpus.
    shorter = ParallelCorpus(["two three"], ["b c"], "A")
    _, second = open_stores(tmp_path, [shorter, OTHER], TOKENIZERS, config)
    assert texts(second.sources) == OTHER.sources
    assert [line.split()[0] for line in caplog.messages] == ["A", "B"]

    # The pairs of the first corpus are known even if only the second store is rebuilt.
    (tmp_path / "train-1" / "store.json").unlink()
    same = ParallelCorpus(["two three", "nine"], ["b c", "k"], "B")
    _, second = open_stores(tmp_path, [shorter, same], TOKENIZERS, config)
    assert texts(second.sources) == ["nine"]


def test_large_vocabularies_use_a_wider_dtype(tmp_path):
    class Large:
        vocab_size, pad_id, eos_id, unk_id, fingerprint = 70_000, 0, 2, 3, "large"

        def encode(self, texts):
            return [[69_999] for _ in texts]

        def with_source_end(self, tokens):
            return [*tokens, self.eos_id]

    (small,) = open_stores(tmp_path, [CORPUS], TOKENIZERS, CONFIG)
    assert small.targets.tokens.dtype == np.uint16
    (large,) = open_stores(tmp_path, [CORPUS], Tokenizers(Large(), Large()), CONFIG)
    assert large.targets.tokens.dtype == np.int32
    assert large.targets[4].tolist() == [69_999, 2]


def test_dropping_all_pairs_is_an_error(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    corpus = ParallelCorpus(["1", ""], ["", "1"], "halves")
    with pytest.raises(UserError, match="halves: all of 2 pairs were dropped: 2 empty side"):
        open_stores(tmp_path, [corpus], TOKENIZERS, CONFIG)
    assert stores_in(tmp_path) == []
    data = dataclasses.replace(CONFIG.data, max_words=1)
    corpus = ParallelCorpus(["1 2", "3 4"], ["5 6", "7 8"], "long")
    with pytest.raises(UserError, match=r"2 more than 1 words; the filters are .*max_words=1\b"):
        open_stores(tmp_path, [corpus], TOKENIZERS, dataclasses.replace(CONFIG, data=data))
