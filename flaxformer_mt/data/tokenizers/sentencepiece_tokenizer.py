"""SentencePiece vocabularies: encoding, decoding and training.

`decode(encode(text))` returns the text in the Unicode normalization of the vocabulary, except that
leading and trailing spaces are removed and runs of spaces become one. (Without
`data.byte_fallback`, characters outside the vocabulary are decoded as " \u2047 ".)
"""

import hashlib
import io
import itertools
import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import sentencepiece

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.data.tokenizers.sentencepiece_model import (
    SPACE,
    WORD,
    TextSampler,
    byte_model,
    open_model,
    parse_model,
    shown_byte,
)
from flaxformer_mt.errors import UserError

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
"""Special ids of the vocabularies trained here."""

_FORMS: dict[str, Literal["NFC", "NFKC"]] = {"nfc": "NFC", "nfkc": "NFKC"}
"""Normalization forms by the name that a model without a table of rules gives its rules."""

_log = logging.getLogger(__name__)

_LONGEST_TEXT = 2**30
"""Limit of SentencePiece: the bytes of a text, which is left out if it is longer."""

_LONG_WORD = re.compile("[^ ]{10000}(?=[^ ])")
"""Part of a word so long that the probabilities of its segmentations underflow."""

_LEFT_OUT = "\u2585"
"""SentencePiece's own symbol: it learns nothing from a text with this character."""

_REQUIRED = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with the content of a SentencePiece `.model` file (Kudo and Richardson 2018)."""

    def __init__(self, model: bytes, name: str = "the vocabulary"):
        self.model: bytes = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self._processor = open_model(model, name)
        self._sampler = TextSampler(self._processor)
        rules = parse_model(model).normalizer_spec
        # A model with a table of rules applies them itself.
        self._form = None if rules.precompiled_charsmap else _FORMS.get(rules.name)
        self._is_bytes = not rules.escape_whitespaces
        self.vocab_size = self._processor.vocab_size()
        self.pad_id = self._processor.pad_id()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        self.unk_id = self._processor.unk_id()

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        texts = _normalized(self._form, texts)
        encoded = self._processor.encode(texts)
        return [
            self._processor.piece_to_id(self.split([text])[0]) if self.unk_id in tokens else tokens
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        split = self._processor.encode(_normalized(self._form, texts), out_type=str)
        return [self._shown(itertools.chain(*map(self._words, pieces))) for pieces in split]

    def _words(self, piece: str) -> list[str]:
        """Separates consecutive unknown words, of which SentencePiece makes one piece."""
        if piece.count(SPACE) > 1 and self._processor.piece_to_id(piece) == self.unk_id:
            return WORD.findall(piece)
        return [piece]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._shown(self.entries(tokens))

    def entries(self, tokens: Sequence[int]) -> list[str]:
        return self._processor.id_to_piece(self._known(tokens))

    def _shown(self, pieces: Iterable[str]) -> list[str]:
        return [*map(shown_byte, pieces)] if self._is_bytes else list(pieces)

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        return self._sampler.sample(_normalized(self._form, texts), seed, amount)

    def sample_sources(
        self, texts: Sequence[str], seed: int, amount: float
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = self._sampler.draw(_normalized(self._form, texts), seed, amount)
        return np.insert(tokens, lengths.cumsum(), self.eos_id), lengths + 1

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return self._processor.decode([self.until_end(self._known(each)) for each in sentences])

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Replaces ids that only the model's embedding table has, which may be larger."""
        return [int(token) if token < self.vocab_size else self.unk_id for token in tokens]


def _normalized(form: Literal["NFC", "NFKC"] | None, texts: Sequence[str]) -> list[str]:
    return [unicodedata.normalize(form, text) for text in texts] if form else list(texts)


def train_sentencepiece(
    texts: Sequence[str], config: DataConfig, tags: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Learns a vocabulary; deterministic. Tags and `config.keep_whole` become one piece each.

    It has fewer than `config.vocab_size` pieces if the corpus is too small.
    """
    form = _FORMS.get(config.normalization)
    whole = _normalized(form, config.keep_whole)
    if config.tokenizer == "bytes":
        kept = dict.fromkeys([*_normalized(form, tags), *whole])
        rules = config.normalization if form else "identity"
        return SentencePieceTokenizer(byte_model([*kept], rules))
    if not any(text.strip() for text in texts):
        raise UserError("the corpus has no text to learn a vocabulary from")
    texts = _normalized(form, [text.replace(_LEFT_OUT, " ") for text in texts])
    if config.tokenizer == "unigram":
        texts = [_LONG_WORD.sub(r"\g<0> ", text) for text in texts]
    # With the preceding space, which would otherwise be a piece of its own.
    symbols = [*(SPACE + text for text in (*_normalized(form, tags), *whole)), *whole]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=config.tokenizer,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            character_coverage=config.character_coverage,
            max_sentence_length=_LONGEST_TEXT,
            # The bytes of a whole word would contain its space, and be decoded with U+2581.
            byte_fallback=config.byte_fallback and config.tokenizer != "word",
            normalization_rule_name="identity",
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            user_defined_symbols=list(dict.fromkeys(symbols)),
            # With several threads, the order of sums and hence the pieces depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # "INTERNAL: src/trainer_interface.cc(638) [condition] Vocabulary size is smaller than ..."
        reason = str(error).rpartition("] ")[2].strip() or str(error)
        needed = _REQUIRED.search(reason)
        if needed:
            reason = (
                f"the characters of the text alone are {needed[1]}: increase data.vocab_size, or "
                "decrease data.character_coverage (0.9995 is usual for Chinese and Japanese)"
            )
        elif "insert_id" in reason:
            reason = "it has no room for the special tokens: increase data.vocab_size"
        raise UserError(
            f"SentencePiece cannot learn data.vocab_size={config.vocab_size} pieces: {reason}"
        ) from error
    proto = parse_model(model.getvalue())
    if form:
        # Complete NFC reorders marks, which SentencePiece's tables of rules cannot express.
        proto.normalizer_spec.name = config.normalization
    tokenizer = SentencePieceTokenizer(proto.SerializeToString(deterministic=True))
    if tokenizer.vocab_size < config.vocab_size:
        _log.info(
            "the corpus yields %d pieces, fewer than data.vocab_size=%d",
            tokenizer.vocab_size,
            config.vocab_size,
        )
    return tokenizer
