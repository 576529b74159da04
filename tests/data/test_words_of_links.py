"""The words that links number, in alignment files and in translations."""

import random
import unicodedata

import numpy as np
import pytest

import flaxformer_mt as fmt
from flaxformer_mt.data.stream.encoded_corpus import encode_pairs
from flaxformer_mt.data.tokenizers.tokenizer import words_of_tokens
from flaxformer_mt.errors import UserError

SPACES = "\u00a0\u202f\u2009\u3000\u200b\u2028\x85\x1c"
"""What `str.split` takes for spaces, and U+200B; words of alignments have them within."""


def random_text(rng, count):
    def word():
        return rng.choice(SPACES).join(rng.choices(["10", "000", "dog", "ﬁne", "é"], k=2))

    text = "".join(f"{word()}{' ' * rng.randint(1, 2)}" for _ in range(count))
    return text if rng.random() < 0.5 else text.strip(" ")


@pytest.fixture(scope="module")
def tokenizers():
    rng = random.Random(0)
    pairs = [(random_text(rng, 5), random_text(rng, 5)) for _ in range(200)]
    return fmt.train_tokenizers(pairs, size=300, normalization="nfkc")


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_random_text_are_of_its_words(tokenizers, seed):
    rng = random.Random(seed)
    text, tokenizer = random_text(rng, rng.randrange(8)), tokenizers.source
    (tokens,), (words,) = tokenizer.encode([text]), words_of_tokens([text], tokenizer)
    given = [word for word in text.split(" ") if word]
    assert sorted({*words}) == [*range(len(given))]
    for number, word in enumerate(given):
        own = [token for token, index in zip(tokens, words, strict=True) if index == number]
        expected = unicodedata.normalize("NFKC", word)
        assert tokenizer.decode([own])[0].split() == expected.split()
    # A tab separates words of alignments, but not those of the vocabulary.
    assert words_of_tokens(["dog dog", "dog\tdog"], tokenizer)[1] is None


def linked(tmp_path, tokenizers, pairs, lines):
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (tmp_path / "a.align").write_text("".join(f"{line}\n" for line in lines))
    corpus = fmt.read_pairs(tmp_path / "a.tsv", alignments=tmp_path / "a.align")
    return encode_pairs([*corpus.pairs()], tokenizers, True, corpus.fields).tokens


def test_links_are_of_words_as_aligners_count_them(tmp_path, tokenizers):
    pair = "10\u00a0000 dog ﬁne", "dog 10\u202f000 ﬁne"
    encoded = linked(tmp_path, tokenizers, [pair], ["0-1 1-0"])
    links = encoded.fields["links"][0].reshape(-1, 2)
    sides = (tokenizers.source, encoded.sources), (tokenizers.target, encoded.targets)
    texts = []
    for side, (tokenizer, sentences) in enumerate(sides):
        tokens = np.array(sentences[0])
        texts += [tokenizer.decode([tokens[[*dict.fromkeys(links[:, side].tolist())]].tolist()])]
    assert sorted(texts[0][0].split()) == sorted(texts[1][0].split()) == ["000", "10", "dog"]


def test_links_of_pieces_are_named_in_one_line(tmp_path, tokenizers):
    pairs = [("dog", "dog")] * 3 + [("dog dog", "dog dog")]
    with pytest.raises(UserError) as caught:
        linked(tmp_path, tokenizers, pairs, ["0-0 2-3"] * 3 + ["0-0 1-1"])
    assert str(caught.value) == (
        f"{tmp_path}/a.align, line 1: the link 2-3 is beyond the words, 1 of the source and 1 of "
        "the target, counted from 0; 3 of 4 pairs have such links, as if pieces of words were "
        "linked: align the words between spaces"
    )
    with pytest.raises(UserError, match=r"link 1-1 is .*: replace other spaces than"):
        linked(tmp_path, tokenizers, [("dog\u00a0dog", "dog dog")], ["0-0 1-1"])
