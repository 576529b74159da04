"""The base class of vocabularies.

Implementations: `sentencepiece_tokenizer` and, for published models, `marian_tokenizer` (OPUS-MT),
`m2m100_tokenizer`, `hub_tokenizer` and `dictionary_tokenizer` (fairseq, OpenNMT-py).

A tag ("<2de>", see `CorpusConfig.tag`) is a single piece: it is never split or merged.
"""

import abc
from collections.abc import Mapping, Sequence

import numpy as np


class Tokenizer(abc.ABC):
    """A vocabulary: conversion between text and token ids.

    Attributes:
      vocab_size: V, the number of token ids, which are 0 to vocab_size - 1.
      pad_id: id of the padding token.
      bos_id: id of the start token.
      eos_id: id of the end token.
      unk_id: id of the unknown token.
      fingerprint: SHA-256 of the vocabulary, in hexadecimal.
      first_id: id of the token that sentences begin with; None = none.
      language_ids: ids of the tokens that name languages; empty unless it is multilingual.
      files: the files of both sides by name, if it is a published vocabulary.
      model: the SentencePiece model that by itself defines this side; None = none.
    """

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    fingerprint: str
    first_id: int | None = None
    language_ids: frozenset[int] = frozenset()
    files: Mapping[str, bytes] = {}
    model: bytes | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each sentence, without start and end tokens.

        It begins with `first_id`, or with its language if the text names one.
        """
        parts = self.encode_parts(texts)
        return parts if self.first_id is None else [self.with_first(tokens) for tokens in parts]

    @abc.abstractmethod
    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of parts of sentences, to which no first token is added."""

    @abc.abstractmethod
    def split(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns the piece of text behind each token of `encode`; words start with U+2581."""

    @abc.abstractmethod
    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each token; those of words start with U+2581."""

    def entries(self, tokens: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each token, as programs name it that read the files."""
        return self.pieces(tokens)

    @abc.abstractmethod
    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns token ids with a random segmentation, as a function of the arguments alone.

        Args:
          texts: the texts.
          seed: from 0 to 2**32 - 1.
          amount: for BPE, the probability of dropping a merge (BPE-dropout, Provilkov et al. 2020);
            for unigram models, the exponent of the probability of a segmentation (subword
            regularization, Kudo 2018). See `data.subword_sampling`.
        """

    def sample_sources(
        self, texts: Sequence[str], seed: int, amount: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of `sample` as encoders read them, in a row, and their numbers.

        These are int32 and int64 [N].
        """
        sentences = [self.with_source_end(ids) for ids in self.sample(texts, seed, amount)]
        tokens = np.array([id for ids in sentences for id in ids], np.int32)
        return tokens, np.array([*map(len, sentences)], np.int64)

    @abc.abstractmethod
    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each sentence up to its first `eos_id`, without special tokens.

        Published vocabularies other than those of `dictionary_tokenizer` remove unknown tokens as
        well.
        """

    def with_first(self, tokens: Sequence[int]) -> list[int]:
        """Returns a sentence with its first token, unless it names its language itself."""
        names_language = bool(tokens) and tokens[0] in self.language_ids
        if self.first_id is None or names_language:
            return list(tokens)
        return [self.first_id, *tokens]

    def with_source_end(self, tokens: Sequence[int]) -> list[int]:
        """Returns a source sentence as encoders read it: with its end token, if it has one.

        An empty sentence always has one.
        """
        return [*tokens, self.eos_id]

    def until_end(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens before the first end token, if there is one."""
        tokens = [int(token) for token in tokens]
        return tokens[: tokens.index(self.eos_id)] if self.eos_id in tokens else tokens
