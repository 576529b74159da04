"""Subword sampling: exact without randomness, correct probabilities with it."""

import collections
import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import load_corpus
from flaxformer_mt.data.tokenizers import subword_sampling
from flaxformer_mt.data.tokenizers.subword_sampling import BpeDropout, UnigramSampling
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers

CONFIG = DataConfig(corpus="phrases", generated_pairs=300, vocab_size=500)
CORPUS = load_corpus(CONFIG, "train")

PIECES = ["a", "b", "c", "ab", "bc", "abc"]
RANKS = {"ab": 0, "bc": 1, "abc": 2}
IDS = {piece: token for token, piece in enumerate(PIECES)}


def fallback(word):
    return [99]


def frequencies(sampler, word, amount, count=20_000):
    drawn = collections.Counter(map(tuple, sampler.sample([word] * count, 0, amount)))
    return {
        "+".join(PIECES[token] for token in ids): number / count for ids, number in drawn.items()
    }


def test_frequency_of_dropped_merges():
    # "ab" first. If it is merged, "abc" is possible; otherwise "bc" is, and then "abc".
    found = frequencies(BpeDropout(RANKS, IDS, fallback), "abc", amount=0.25)
    wanted = {
        "abc": 0.75 * 0.75 + 0.25 * 0.75 * 0.75,
        "ab+c": 0.75 * 0.25,
        "a+bc": 0.25 * 0.75 * 0.25,
        "a+b+c": 0.25 * 0.25,
    }
    assert found == pytest.approx(wanted, abs=0.01)


def drop_merges(word, ranks, first, is_dropped):
    """Returns the pieces of a word, by one search for the next merge after the other."""
    pieces, dropped, possible = list(word), set(), 0
    while True:
        # A dropped merge is possible again when one of its pieces changes.
        ends = itertools.pairwise(itertools.accumulate(map(len, pieces), initial=0))
        merges = [
            (ranks[left + right], place, (start, left, right))
            for place, ((left, right), (start, _)) in enumerate(
                zip(itertools.pairwise(pieces), ends, strict=False)
            )
            if left + right in ranks and (start, left, right) not in dropped
        ]
        if not merges:
            return pieces
        _, place, merge = min(merges)
        possible += 1
        if possible == first or (possible > first and is_dropped()):
            dropped.add(merge)
        else:
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.mark.parametrize("with_numba", [True, False])
@pytest.mark.parametrize("amount", [1e-9, 0.05, 0.3, 0.9, 1.0])
def test_merges_are_dropped_in_turn(monkeypatch, amount, with_numba):
    """Also with pieces of equal ranks, and words that are not sampled."""
    if with_numba:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(subword_sampling, "compiled", lambda function: None)
    random_numbers = np.random.default_rng(0)
    choice = random_numbers.choice
    pieces = sorted({*"abc", *("".join(choice([*"abc"], n)) for n in [2, 3, 4, 5] * 20)})
    ids = {piece: int(token) for token, piece in enumerate(pieces)}
    ranks = {piece: float(random_numbers.integers(30)) for piece in pieces if len(piece) > 1}
    lengths = random_numbers.integers(0, 30, 500).tolist()
    words = ["".join(choice([*"abcX"], n, p=[0.33, 0.33, 0.33, 0.01])) for n in lengths]
    sampler = BpeDropout(ranks, ids, fallback, ["cab"], "a")
    for seed in (0, 1, 2**32 - 1):
        words = words[seed % 7 :]
        draw = random.Random(seed).random
        firsts = np.random.default_rng(seed).geometric(amount, size=len(words)).tolist()
        expected = [
            [99]
            if "X" in word or "cab" in "a" + word
            else [
                ids[piece]
                for piece in drop_merges("a" + word, ranks, first, lambda: draw() < amount)  # noqa: B023
            ]
            for word, first in zip(words, firsts, strict=True)
        ]
        assert sampler.sample(words, seed, amount) == expected
    assert sampler.sample([], 0, amount) == []


@pytest.mark.parametrize("with_numba", [True, False])
def test_words_of_texts(monkeypatch, with_numba):
    if with_numba:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(subword_sampling, "compiled", lambda function: None)
    random_numbers = np.random.default_rng(0)
    known, numbers = subword_sampling._Words(), {}
    # Long words, a few of them each time, as the table grows, and then many short ones.
    for texts, most, longest in [(2, 4, 30)] * 250 + [(30, 40, 4)] * 3:
        lists = [
            [
                "".join(random_numbers.choice([*"aé猫𝕏▀"], n))
                for n in random_numbers.integers(0, longest, m)
            ]
            for m in random_numbers.integers(0, most, texts)
        ]
        words = [*itertools.chain(*lists)]
        before = len(numbers)
        expected = [numbers.setdefault(word, len(numbers)) for word in words]
        found, counts, new = known.number(["".join("\u2581" + w for w in each) for each in lists])
        assert found.tolist() == expected
        assert counts.tolist() == [*map(len, lists)]
        assert new == [*numbers][before:]
    assert known.number([])[2] == []


def test_frequency_of_unigram_segmentations():
    probabilities = {"abc": 0.5, "ab+c": 0.3, "a+bc": 0.2}
    splits = [[IDS[piece] for piece in split.split("+")] for split in probabilities]
    # The probability of the last piece determines that of the segmentation.
    scores = [0.0] * len(PIECES)
    scores[IDS["abc"]], scores[IDS["c"]], scores[IDS["bc"]] = map(math.log, probabilities.values())
    sampler = UnigramSampling(lambda word: splits, scores)
    assert frequencies(sampler, "abc", amount=1.0) == pytest.approx(probabilities, abs=0.01)
    rooted = {split: math.sqrt(p) for split, p in probabilities.items()}
    total = sum(rooted.values())
    assert frequencies(sampler, "abc", amount=0.5) == pytest.approx(
        {split: p / total for split, p in rooted.items()}, abs=0.01
    )


def test_bpe_without_dropout_equals_sentencepiece():
    tokenizer = Tokenizers.train([CORPUS], CONFIG).source
    texts = [
        *CORPUS.sources,
        *CORPUS.targets,
        "  two   spaces ",
        "",
        "unseen: łódź 東京",
        "a\u2581b",
    ]
    assert tokenizer.sample(texts, seed=0, amount=1e-12) == tokenizer.encode(texts)


SAMPLE = """
    import sys
    from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.errors import UserError
    tokenizer = Tokenizers.load(sys.argv[1]).source
    print(tokenizer.sample(["one hundred and twenty-three"] * 20, 7, 0.3))
"""


@pytest.mark.slow_except("bpe")
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_samples_are_the_same_in_every_process(tmp_path, kind):
    """Otherwise a run could not be resumed exactly."""
    tokenizers = Tokenizers.train([CORPUS], DataConfig(**{**vars(CONFIG), "tokenizer": kind}))
    tokenizers.save(tmp_path)
    script = "\n".join(line.strip() for line in SAMPLE.splitlines())
    printed = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    ).stdout
    expected = tokenizers.source.sample(["one hundred and twenty-three"] * 20, 7, 0.3)
    assert printed == f"{expected}\n"
    assert len(set(map(tuple, expected))) > 1
