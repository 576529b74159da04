import collections
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxformer_mt.decoding.shortlist import MIN_PROBABILITY, Shortlist, learn, write_table

sentences = st.lists(st.integers(0, 4), max_size=4)
corpora = st.lists(st.tuples(sentences, sentences), min_size=1, max_size=5)


def slow_learn(pairs, iterations):
    """Computes the same as `learn`, one link per step."""
    table = collections.defaultdict(lambda: 1.0)
    for _ in range(iterations):
        counts = collections.Counter()
        for source, target in pairs:
            generators = [*source, None]
            for token in target:
                total = sum(table[generator, token] for generator in generators)
                for generator in generators:
                    counts[generator, token] += table[generator, token] / total
        totals = collections.Counter()
        for (generator, _), count in counts.items():
            totals[generator] += count
        table = {key: count / totals[key[0]] for key, count in counts.items()}
        table = collections.defaultdict(float, table)
    return {key: p for key, p in table.items() if key[0] is not None and p >= MIN_PROBABILITY}


@given(corpora, st.integers(1, 4))
def test_probabilities_match_a_slow_implementation(pairs, iterations):
    sources, targets = zip(*pairs, strict=True)
    assert learn(sources, targets, iterations) == pytest.approx(slow_learn(pairs, iterations))


class Vocabulary:
    eos_id = 0

    def __init__(self, *words):
        self.words = ["</s>", "a\tb", *(f"\u2581{word}" for word in words)]
        self.vocab_size = len(self.words)

    def pieces(self, tokens):
        return [self.words[token] for token in tokens]

    def encode(self, texts):
        return [[self.words.index(f"\u2581{word}") for word in text.split()] for text in texts]

    encode_parts = encode


@pytest.mark.parametrize("name", ["lex", "lex.gz"])
def test_a_learned_table_can_be_read(tmp_path, name):
    source, target = Vocabulary("the", "dog", "cat"), Vocabulary("Hund", "Katze", "der", "die")
    tokenizers = types.SimpleNamespace(source=source, target=target, joint=False)
    sources = source.encode(["the dog", "the dog", "the cat", "the cat"])
    targets = target.encode(["der Hund", "Hund", "die Katze", "Katze"])
    table = learn([*sources, [1]], [*targets, [1]])
    write_table(tmp_path / name, table, tokenizers)
    shortlist = Shortlist.read(tmp_path / name, tokenizers, first=0, best=1)
    allowed = shortlist.allowed(source.encode(["dog cat"])[0])
    assert target.pieces(allowed) == ["</s>", "\u2581Hund", "\u2581Katze"]


def test_a_compressed_table_does_not_contain_the_time(tmp_path, monkeypatch):
    tokenizers = types.SimpleNamespace(source=Vocabulary("dog"), target=Vocabulary("Hund"))
    for now in (1e9, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        write_table(tmp_path / f"{now}.gz", {(2, 2): 0.5}, tokenizers)
    first, second = tmp_path.glob("*.gz")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("piece", ["\u2581\r", "\x0c", "\u2581Hund\t", "a b", "\n"])
def test_pieces_with_white_space_are_left_out(tmp_path, piece):
    source, target = Vocabulary("dog"), Vocabulary("Hund")
    target.words[1] = piece
    tokenizers = types.SimpleNamespace(source=source, target=target)
    write_table(tmp_path / "lex", {(2, 1): 0.5, (2, 2): 0.5}, tokenizers)
    assert (tmp_path / "lex").read_text() == "\u2581Hund \u2581dog 0.500000\n"
