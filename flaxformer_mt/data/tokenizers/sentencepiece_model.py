"""SentencePiece model files: loading, and random segmentation of text."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from flaxformer_mt.data.tokenizers.subword_sampling import (
    MOST_SPLITS,
    SPACE,
    BpeDropout,
    UnigramSampling,
    WordSampler,
    as_lists,
)
from flaxformer_mt.errors import UserError

WORD = re.compile(f"{SPACE}[^{SPACE}]*")
"""A word of normalized text."""


def open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Loads a model from the content of its file; `name` is that of the model, for messages."""
    if not model:  # SentencePiece would load nothing, and fail later.
        raise UserError(f"{name} is not a SentencePiece model: it is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"{name} is not a SentencePiece model: {error}") from error


def parse_model(model: bytes) -> Any:
    """Returns the `ModelProto` of a model that `open_model` accepts."""
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    return proto


BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The pieces of bytes."""


def byte_model(whole: Sequence[str] = (), rules: str = "identity") -> bytes:
    """Returns a model whose tokens are the bytes of the text, its spaces included.

    Padding, start, end and the unknown token have the ids 0 to 3, and the bytes follow.

    Args:
      whole: texts that are one token each, with the ids after the bytes.
      rules: the name of the rules of normalization.
    """
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    kinds = proto.SentencePiece
    for pieces, kind in (
        (["<pad>", "<s>", "</s>"], kinds.CONTROL),
        (["<unk>"], kinds.UNKNOWN),
        (BYTES, kinds.BYTE),
        (whole, kinds.USER_DEFINED),
    ):
        for piece in pieces:
            proto.pieces.add(piece=piece, score=0.0, type=kind)
    trainer = proto.trainer_spec
    trainer.model_type, trainer.byte_fallback = trainer.CHAR, True
    trainer.pad_id, trainer.bos_id, trainer.eos_id, trainer.unk_id = range(4)
    trainer.vocab_size = len(proto.pieces)
    spec = proto.normalizer_spec
    spec.name = rules
    spec.add_dummy_prefix = spec.remove_extra_whitespaces = spec.escape_whitespaces = False
    return bytes(proto.SerializeToString(deterministic=True))


def shown_byte(piece: str) -> str:
    """Returns the piece of a byte as text: U+2581 for a space, ASCII as it is, else "<0xC3>"."""
    if piece not in BYTES:
        return piece
    character = chr(int(piece[1:-1], 16))
    return SPACE if character == " " else character if " " < character < "\x7f" else piece


class TextSampler:
    """Segments texts into pieces at random."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor

    def __reduce__(self) -> tuple[type["TextSampler"], tuple[Any]]:
        return TextSampler, (self._processor,)

    @functools.cached_property
    def _words(self) -> WordSampler:
        return _word_sampler(self._processor)

    def draw(self, texts: Sequence[str], seed: int, amount: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the model's piece ids of all texts in a row, and how many each has, int64 [N].

        Arguments as in `Tokenizer.sample`.
        """
        return self._words.draw(self._processor.normalize(list(texts)), seed, amount)

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Returns the model's piece ids for each text; arguments as in `Tokenizer.sample`."""
        return as_lists(*self.draw(texts, seed, amount))

    def sample_pieces(self, texts: Sequence[str], seed: int, amount: float) -> list[list[str]]:
        """Returns the pieces for each text; one with unknown pieces is segmented in the best way.

        The id of the unknown piece does not tell its text.
        """
        unknown = self._processor.unk_id()
        best = self._processor.encode(list(texts), out_type=str)
        return [
            self._processor.id_to_piece(ids) if unknown not in ids else pieces
            for ids, pieces in zip(self.sample(texts, seed, amount), best, strict=True)
        ]


def _word_sampler(
    processor: sentencepiece.SentencePieceProcessor,
) -> WordSampler:
    proto = parse_model(processor.serialized_model_proto())
    pieces = list(enumerate(proto.pieces))
    if not proto.normalizer_spec.add_dummy_prefix or proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(
            "data.subword_sampling needs a vocabulary whose words begin with a space, not one of "
            "spm_train --add_dummy_prefix=false or --treat_whitespace_as_suffix: set it to 0"
        )

    whole = tuple(piece.piece for _, piece in pieces if piece.type == piece.USER_DEFINED)
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:

        def best_splits(word: str) -> list[list[int]]:
            # SentencePiece adds the space again.
            if any(
                piece in SPACE + word for piece in whole
            ):  # nbest_encode would split these, too.
                return [processor.encode(word)]
            return processor.nbest_encode(word, nbest_size=MOST_SPLITS)

        return UnigramSampling(best_splits, [piece.score for _, piece in pieces])
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type)
        raise UserError(
            f"data.subword_sampling needs a bpe or unigram vocabulary, not one of kind {kind}: set "
            "it to 0"
        )
    normal = [(token, piece) for token, piece in pieces if piece.type == piece.NORMAL]
    return BpeDropout(
        ranks={piece.piece: -piece.score for _, piece in normal},
        ids={piece.piece: token for token, piece in normal},
        encode=processor.encode,
        whole=whole,
        prefix=SPACE,
    )
