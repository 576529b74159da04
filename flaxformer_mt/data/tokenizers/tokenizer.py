"""Text to token ids and back: one protocol, and SentencePiece behind it.

The vocabularies of OPUS-MT models, behind the same protocol, are in `marian_tokenizer.py`.

Texts are taken as they are, without Unicode normalisation, so that `decode(encode(text))` is `text`
again. Only spaces are tidied: those at either end go, and several in a row become one. (With
`data.byte_fallback` off, characters outside the vocabulary come back as " \u2047 ".)

A tag ("<2de>", see `CorpusConfig.tag`) is a piece of its own: never split, and never part of
another.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from flaxformer_mt.config import DataConfig
from flaxformer_mt.data.corpora.corpus import Corpus
from flaxformer_mt.data.progress import counted
from flaxformer_mt.data.tokenizers import marian_tokenizer
from flaxformer_mt.data.tokenizers.marian_tokenizer import MarianTokenizer
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs import atomic

MAX_TRAINING_PAIRS = 1_000_000
"""Pairs that a vocabulary is learned from, at most. Larger corpora give more than half as many, at
equal distances: more text would take much longer and hardly change the pieces."""

_Item = TypeVar("_Item")

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

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        """What each token of `encode` was in the text; a word's first piece starts with U+2581."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The vocabulary's entry of each token."""

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """Token ids of the texts, each split at random in one of the ways that give it back.

        The same arguments give the same ids, whatever was drawn before, in any thread and process.

        Args:
          texts: as for `encode`.
          seed: from 0 to 2**32 - 1.
          amount: bpe: the probability with which a merge is left out (BPE-dropout, Provilkov et
            al. 2020); unigram: the exponent of a split's probability (subword regularisation, Kudo
            2018). See `data.subword_sampling`.
        """

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sentence up to its first `eos_id`; special ids give no text."""


def tags(config: DataConfig) -> list[str]:
    """The words of all tags that the corpora of `config` have, each once."""
    corpora = (*config.train_corpora, *config.valid_corpora, *config.test_corpora)
    return list(dict.fromkeys(word for corpus in corpora for word in corpus.tag.split()))


def evenly(items: Iterable[_Item], limit: int) -> list[_Item]:
    """Items at equal distances from the first on, read once and without knowing how many there are.

    Returns:
      All items if they are at most `limit`, or else more than half as many as `limit`.
    """
    taken: list[_Item] = []
    distance = 1
    for number, item in enumerate(items):
        if number % distance == 0:
            taken.append(item)
            if len(taken) > limit:
                del taken[1::2]
                distance *= 2
    return taken


@dataclasses.dataclass(frozen=True)
class Tokenizers:
    """The vocabularies of one model; with a joint vocabulary both are the same object."""

    source: SentencePieceTokenizer | MarianTokenizer
    target: SentencePieceTokenizer | MarianTokenizer

    @classmethod
    def for_run(
        cls, corpora: Sequence[Corpus], config: DataConfig, has_inputs: bool = True
    ) -> "Tokenizers":
        """Reads the vocabularies that `data.tokenizer_path` names, or learns them.

        Args:
          corpora: the training corpora.
          config: says which, and how many pieces to learn.
          has_inputs: False for a language model.

        Raises:
          UserError: see `load` and `train`.
        """
        if not config.tokenizer_path:
            return cls.train(corpora, config, has_inputs)
        given = Path(config.tokenizer_path)
        folder = given / "tokenizer" if (given / "tokenizer").is_dir() else given
        if not folder.is_dir():
            raise UserError(
                f"data.tokenizer_path={given} is no folder: name a run folder, or its folder "
                "tokenizer"
            )
        tokenizers = cls.load(folder)
        for tag, pieces in zip(tags(config), tokenizers.source.encode(tags(config)), strict=True):
            if len(pieces) > 1:
                _log.warning(
                    "the tag %s is %d pieces in the vocabulary of data.tokenizer_path=%s",
                    tag,
                    len(pieces),
                    given,
                )
        return tokenizers

    @classmethod
    def train(
        cls, corpora: Sequence[Corpus], config: DataConfig, has_inputs: bool = True
    ) -> "Tokenizers":
        """Learns one joint vocabulary or two separate ones, as `config` says.

        A language model (`has_inputs` is False) has one vocabulary, that of its targets.

        Raises:
          UserError: see `train_sentencepiece`.
        """
        stream = itertools.chain.from_iterable(corpus.pairs() for corpus in corpora)
        pairs = evenly(counted(stream, "reading text for a vocabulary"), MAX_TRAINING_PAIRS)
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if has_inputs and not config.joint_vocabulary:
            return cls(
                train_sentencepiece(sources, config, tags(config)),
                train_sentencepiece(targets, config),
            )
        if has_inputs:
            joint = train_sentencepiece([*sources, *targets], config, tags(config))
        else:
            joint = train_sentencepiece(targets, config)
        return cls(joint, joint)

    @property
    def joint(self) -> bool:
        """Whether source and target have one vocabulary."""
        return self.source is self.target

    def save(self, folder: str | Path) -> None:
        """Writes what `load` reads into `folder`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self._files().items():
            atomic.write_bytes(Path(folder, name), content)

    def _files(self) -> Mapping[str, bytes]:
        if isinstance(self.source, MarianTokenizer):
            return self.source.files  # They say all about both sides.
        assert isinstance(self.target, SentencePieceTokenizer)
        if self.joint:
            return {"joint.model": self.source.model}
        return {"source.model": self.source.model, "target.model": self.target.model}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizers":
        """Reads `joint.model`; or `source.model` and `target.model`; or an OPUS-MT vocabulary.

        Raises:
          UserError: a file is missing or damaged.
        """
        if Path(folder, marian_tokenizer.VOCABULARY_FILE).exists():
            files = marian_tokenizer.read_files(folder)
            return cls(
                MarianTokenizer(files, "source", str(folder)),
                MarianTokenizer(files, "target", str(folder)),
            )
        joint_path = Path(folder, "joint.model")
        if joint_path.exists():
            joint = _read_model(joint_path)
            return cls(joint, joint)
        return cls(
            _read_model(Path(folder, "source.model")), _read_model(Path(folder, "target.model"))
        )


def _read_model(path: Path) -> SentencePieceTokenizer:
    try:
        return SentencePieceTokenizer(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise UserError(f"the tokenizer {path} is missing") from error
