"""SentencePiece models: reading them, and splitting text at random with them."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from flaxformer_mt.data.tokenizers.subword_sampling import (
    MOST_SPLITS,
    BpeDropout,
    UnigramSampling,
    WordSampler,
)
from flaxformer_mt.errors import UserError

SPACE = "\u2581"
"""How SentencePiece writes a space, also the one that it puts before a text."""

_WORD = re.compile(f"{SPACE}[^{SPACE}]*")


def open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """What encodes and decodes with a model.

    Args:
      model: the bytes of its file.
      name: what a message calls it.

    Raises:
      UserError: this is no SentencePiece model.
    """
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"{name} is not a SentencePiece model: {error}") from error


def read_model(model: bytes) -> Any:
    """The `ModelProto` of a model: its pieces with their kinds and scores, and how it was made."""
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    return proto


class TextSampler:
    """Splits texts at random into pieces.

    Args:
      model: the bytes of a model's file.
      processor: from `open_model`.
    """

    def __init__(self, model: bytes, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        self._words = _word_sampler(read_model(model), processor)

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """The model's own ids of each text's pieces; arguments as in `Tokenizer.sample`."""
        words = [_WORD.findall(text) for text in self._processor.normalize(list(texts))]
        sampled = self._words.sample(list(itertools.chain(*words)), seed, amount)
        left = iter(sampled)
        return [list(itertools.chain(*itertools.islice(left, len(own)))) for own in words]


def _word_sampler(proto: Any, processor: sentencepiece.SentencePieceProcessor) -> WordSampler:
    pieces = list(enumerate(proto.pieces))

    def without_space(word: str) -> str:
        return word.removeprefix(SPACE)  # SentencePiece puts it there again.

    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        return UnigramSampling(
            lambda word: processor.nbest_encode(without_space(word), nbest_size=MOST_SPLITS),
            [piece.score for _, piece in pieces],
        )
    normal = [(token, piece) for token, piece in pieces if piece.type == piece.NORMAL]
    return BpeDropout(
        ranks={piece.piece: -piece.score for _, piece in normal},
        ids={piece.piece: token for token, piece in normal},
        encode=lambda word: processor.encode(without_space(word)),
        whole=[piece.piece for _, piece in pieces if piece.type == piece.USER_DEFINED],
    )
