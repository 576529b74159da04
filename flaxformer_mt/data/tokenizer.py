"""Text to token ids and back: one protocol, and SentencePiece behind it.

Texts are taken as they are, without Unicode normalisation, so that `decode(encode(text))` is `text`
again. Only spaces are tidied: those at either end go, and several in a row become one. (With
`data.byte_fallback` off, characters outside the vocabulary come back as " \u2047 ".)
"""

import dataclasses
import functools
import hashlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpus import ParallelCorpus
from flaxformer_mt.errors import UserError

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
"""The special ids of every tokenizer that is trained here."""

_log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What the other rooms need to know of a vocabulary."""

    @property
    def vocab_size(self) -> int:
        """V: ids run from 0 to vocab_size - 1."""

    @property
    def pad_id(self) -> int:
        """Id that fills rows."""

    @property
    def bos_id(self) -> int:
        """Id that starts a sentence."""

    @property
    def eos_id(self) -> int:
        """Id that ends a sentence."""

    @property
    def unk_id(self) -> int:
        """Id of what the vocabulary cannot spell."""

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the vocabulary."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without start and end."""

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sentence up to its first `eos_id`; special ids give no text."""


class SentencePieceTokenizer:
    """A trained SentencePiece model (Kudo and Richardson 2018).

    Args:
      model: the bytes of a `.model` file.
    """

    def __init__(self, model: bytes):
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.vocab_size()
        self.pad_id: int = self._processor.pad_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the model file."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        return self._processor.encode(list(texts))

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """See `Tokenizer.decode`."""
        return self._processor.decode([self._until_end(sentence) for sentence in sentences])

    def _until_end(self, sentence: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in sentence]
        return tokens[: tokens.index(self.eos_id)] if self.eos_id in tokens else tokens


def train_sentencepiece(texts: Sequence[str], config: DataConfig) -> SentencePieceTokenizer:
    """Learns a vocabulary from `texts`; the same texts give the same bytes.

    A corpus too small for `config.vocab_size` pieces gets as many as it yields.

    Raises:
      UserError: there is no text, or `config.vocab_size` has no room for its characters.
    """
    if not any(text.strip() for text in texts):
        raise UserError("the corpus has no text to learn a vocabulary from")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=config.tokenizer,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name="identity",
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            # Sums over threads would make the pieces depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # "INTERNAL: src/trainer_interface.cc(638) [condition] Vocabulary size is smaller than ..."
        reason = str(error).rpartition("] ")[2].strip()
        raise UserError(
            f"SentencePiece cannot learn data.vocab_size={config.vocab_size} pieces: {reason}"
        ) from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    if tokenizer.vocab_size < config.vocab_size:
        _log.info(
            "the corpus yields %d pieces, fewer than data.vocab_size=%d",
            tokenizer.vocab_size,
            config.vocab_size,
        )
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The vocabularies of one model; with a joint vocabulary both are the same object."""

    source: SentencePieceTokenizer
    target: SentencePieceTokenizer

    @classmethod
    def train(cls, corpus: ParallelCorpus, config: DataConfig) -> "Tokenizers":
        """Learns one joint vocabulary or two separate ones, as `config` says.

        Raises:
          UserError: see `train_sentencepiece`.
        """
        if config.joint_vocabulary:
            joint = train_sentencepiece([*corpus.sources, *corpus.targets], config)
            return cls(joint, joint)
        return cls(
            train_sentencepiece(corpus.sources, config), train_sentencepiece(corpus.targets, config)
        )

    @property
    def joint(self) -> bool:
        """Whether source and target have one vocabulary."""
        return self.source is self.target

    def save(self, folder: str | Path) -> None:
        """Writes `joint.model`, or `source.model` and `target.model`, into `folder`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        if self.joint:
            Path(folder, "joint.model").write_bytes(self.source.model)
        else:
            Path(folder, "source.model").write_bytes(self.source.model)
            Path(folder, "target.model").write_bytes(self.target.model)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizers":
        """Reads what `save` wrote.

        Raises:
          UserError: a model file is missing or damaged.
        """
        joint_path = Path(folder, "joint.model")
        if joint_path.exists():
            joint = _read_model(joint_path)
            return cls(joint, joint)
        return cls(
            _read_model(Path(folder, "source.model")), _read_model(Path(folder, "target.model"))
        )


def _read_model(path: Path) -> SentencePieceTokenizer:
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"the tokenizer {path} is missing") from error
    except RuntimeError as error:
        raise UserError(f"{path} is not a SentencePiece model: {error}") from error
