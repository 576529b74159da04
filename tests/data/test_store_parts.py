"""Parts of token stores: any processes make them, in any order; kills cost what was unfinished."""

import dataclasses
import random

import pytest

from flaxformer_mt.config import DataConfig, ExperimentConfig
from flaxformer_mt.data.corpora.corpus import ParallelCorpus, load_corpus
from flaxformer_mt.data.corpora.shared_text import HeldOutText
from flaxformer_mt.data.sanity_checks import warn_of_shared_text
from flaxformer_mt.data.stream import store_parts
from flaxformer_mt.data.stream.token_store import make_parts, open_stores
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

PHRASES = load_corpus(DataConfig(corpus="phrases", generated_pairs=200), "train")
FIRST = dataclasses.replace(
    PHRASES,
    sources=[*PHRASES.sources[:60], "", *PHRASES.sources[20:40]],
    targets=[*PHRASES.targets[:60], "x", *PHRASES.targets[20:40]],
    name="first",
)
SECOND = dataclasses.replace(
    PHRASES, sources=PHRASES.sources[50:90], targets=PHRASES.targets[50:90], name="second"
)
CORPORA = [FIRST, SECOND]
CONFIG = ExperimentConfig(data=DataConfig(drop_duplicates=True, subword_sampling=0.1))
TOKENIZERS = Tokenizers.train(CORPORA, CONFIG.data)


def bytes_of(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(store_parts, "ROWS", 7)
    monkeypatch.setattr(store_parts, "_HASHES_AT_ONCE", 10)


@pytest.fixture
def whole(tmp_path):
    """The files of stores that one process has made at once."""
    open_stores(tmp_path / "whole", CORPORA, TOKENIZERS, CONFIG)
    return bytes_of(tmp_path / "whole")


@pytest.mark.slow_except("3")
@pytest.mark.parametrize("seed", range(5))
def test_any_processes_make_the_same_bytes(seed, whole, tmp_path):
    generator = random.Random(seed)
    count = generator.randint(1, 20)
    shards = [index for index in range(count) if generator.random() < 0.7]
    generator.shuffle(shards)
    for index in shards:
        make_parts(tmp_path / "parts", CORPORA, TOKENIZERS, CONFIG, index, count)
    open_stores(tmp_path / "parts", CORPORA, TOKENIZERS, CONFIG)
    assert bytes_of(tmp_path / "parts") == whole


def test_what_held_out_text_shares_is_found_while_parts_are_made(tmp_path, caplog):
    held_out = dataclasses.replace(
        PHRASES,
        sources=[PHRASES.sources[3], PHRASES.sources[30], "Nothing", PHRASES.sources[70]],
        targets=[PHRASES.targets[3], "x", "nichts", PHRASES.targets[70]],
        name="held out",
    )
    data = dataclasses.replace(CONFIG.data, max_words=9)
    config = dataclasses.replace(CONFIG, data=data)
    text = HeldOutText.of([held_out])
    warn_of_shared_text(CORPORA, text, data)
    read = [*caplog.messages]
    assert len(read) == 3
    caplog.clear()
    for index in (1, 0):
        make_parts(tmp_path, CORPORA, TOKENIZERS, config, index, 3, text)
    stores = open_stores(tmp_path, CORPORA, TOKENIZERS, config, held_out=text)
    unreadable = [dataclasses.replace(each, sources=[], targets=[""]) for each in CORPORA]
    warn_of_shared_text(unreadable, text, data, stores=stores)
    assert caplog.messages == read
    # Of other held-out text, a store knows nothing.
    other = HeldOutText([held_out, held_out])
    with pytest.raises(ValueError, match="zip"):
        warn_of_shared_text(unreadable, other, data, stores=stores)


class Dying(ParallelCorpus):
    """Ends the process, as it were, after some pairs, and counts those that it gave."""

    given, last = 0, None

    def pairs(self):
        for pair in super().pairs():
            if Dying.given == Dying.last:
                raise KeyboardInterrupt
            Dying.given += 1
            yield pair


def test_what_was_made_before_a_kill_is_not_made_again(whole, tmp_path, monkeypatch):
    made = []
    write = store_parts.Parts._write
    monkeypatch.setattr(
        store_parts.Parts,
        "_write",
        lambda self, number, *part: (
            made.append((self.folder.name, number)),
            write(self, number, *part),
        ),
    )
    corpora = [Dying(FIRST.sources, FIRST.targets, "first", FIRST.languages), SECOND]
    for last in (10, 40):
        Dying.given, Dying.last = 0, last
        with pytest.raises(KeyboardInterrupt):
            open_stores(tmp_path / "killed", corpora, TOKENIZERS, CONFIG)
    Dying.given, Dying.last = 0, None
    open_stores(tmp_path / "killed", corpora, TOKENIZERS, CONFIG)
    assert bytes_of(tmp_path / "killed") == whole
    assert len(made) == len(set(made)) == -(-len(FIRST) // 7) + -(-len(SECOND) // 7)
