"""The vocabulary of an OPUS-MT model: text to token ids and back as `MarianTokenizer` does it.

SentencePiece cuts a text, with one model for sources and one for targets, and the ids of its pieces
stand in JSON files of their own. Two things are tokens as they stand: special tokens that are
written in the text ("</s>"), and a language code at its beginning (">>fra<<").

Source: Hugging Face transformers 5 (models/marian/tokenization_marian.py, tokenization_python.py),
whose results these are for any text. (`normalize`, which there has to be called by the user, is
left to the user here, too.)
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, TextSampler, open_model
from flaxformer_mt.errors import UserError

VOCABULARY_FILE, TARGET_VOCABULARY_FILE = "vocab.json", "target_vocab.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_REQUIRED_FILES = ("source.spm", "target.spm", VOCABULARY_FILE)
_FILES = (
    *_REQUIRED_FILES,
    TARGET_VOCABULARY_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What a Hugging Face folder may say about its tokenizer."""

# In the order in which those that the vocabulary lacks get ids.
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_DEFAULTS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

_CODE = re.compile(">>.*?<<", re.DOTALL)

_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip

TokenizerFiles = Mapping[str, bytes]
"""The content of those of `_FILES` that there are, by name."""
Split = Callable[[list[str]], list[list[str]]]
"""Cuts texts, in which nothing is a token as it stands, into pieces."""


class MarianTokenizer:
    """One side, source or target, of an OPUS-MT vocabulary; see `Tokenizer` for the methods.

    Attributes:
      files: both sides were made of.
      vocab_size: the highest id, plus 1. Not every id below it need be that of a token.
    """

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Makes the tokenizer of a side.

        Args:
          files: from `read_files`.
          side: which one.
          folder: where messages say that the files are.

        Raises:
          UserError: a file is damaged, or asks for something that is not known here.
        """
        self.files = files
        label = functools.partial(Path, folder)
        settings = _Settings.read(files, label)
        name = f"{side}.spm"
        self._processor = open_model(files[name], str(label(name)))
        vocabulary_name = TARGET_VOCABULARY_FILE if settings.is_separate(side) else VOCABULARY_FILE
        vocabulary = _read_vocabulary(files, vocabulary_name, label)
        # Ids of special tokens are the source's, whichever the side.
        added = settings.added_tokens(_read_vocabulary(files, VOCABULARY_FILE, label))
        self._added = {token.content: token for token in added.values()}
        self._cleans_up = settings.cleans_up
        self._cut = settings.cutter(self._added)

        added_ids = {token.content: id for id, token in added.items()}
        self._ids = vocabulary | added_ids
        self._names = {id: piece for piece, id in vocabulary.items()}
        self._names |= {id: token.content for id, token in added.items()}
        self._special = frozenset(settings.special)
        self._special_ids = {added_ids[token] for token in settings.special}
        self.vocab_size = max(self._ids.values()) + 1
        if settings.token("unk_token") not in vocabulary:
            raise UserError(f"{label(vocabulary_name)} has no {settings.token('unk_token')}")
        self.unk_id = vocabulary[settings.token("unk_token")]
        self.pad_id = self.bos_id = added_ids[settings.token("pad_token")]
        self.eos_id = added_ids[settings.token("eos_token")]

        # With one vocabulary, Hugging Face decodes targets, too, by the source's model.
        decoder_name = name if settings.separate else "source.spm"
        self._decoder = open_model(files[decoder_name], str(label(decoder_name)))
        used = {
            name,
            decoder_name,
            vocabulary_name,
            *_FILES[len(_REQUIRED_FILES) + 1 :],
        }
        self.fingerprint = _fingerprint({name: files[name] for name in used & files.keys()})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        return self._encode(texts, self._split)

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        """See `Tokenizer.split`."""
        return self._tokenize(texts, self._split)

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        """See `Tokenizer.sample`."""

        def split(chunks: list[str]) -> list[list[str]]:
            unknown = self._processor.unk_id()
            drawn = self._sampler.sample(chunks, seed, amount)
            # A piece that SentencePiece does not know has an id that does not tell which it is.
            return [
                self._processor.id_to_piece(ids) if unknown not in ids else best
                for ids, best in zip(drawn, self._split(chunks), strict=True)
            ]

        return self._encode(texts, split)

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """See `Tokenizer.decode`; unknown tokens, too, give no text."""
        return [self._decode(sentence) for sentence in sentences]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """See `Tokenizer.pieces`."""
        return [self._piece(int(token)) for token in tokens]

    @functools.cached_property
    def _sampler(self) -> TextSampler:
        return TextSampler(self._processor.serialized_model_proto(), self._processor)

    def _split(self, chunks: list[str]) -> list[list[str]]:
        return self._processor.encode(chunks, out_type=str)

    def _encode(self, texts: Sequence[str], split: Split) -> list[list[int]]:
        return [
            [self._ids.get(piece, self.unk_id) for piece in pieces]
            for pieces in self._tokenize(texts, split)
        ]

    def _tokenize(self, texts: Sequence[str], split: Split) -> list[list[str]]:
        """The tokens of each text, whether the vocabulary has them or not."""
        parts = [list(self._parts(text)) for text in texts]
        left = iter(split([part for each in parts for part, whole in each if not whole]))
        return [
            [piece for part, whole in each for piece in ([part] if whole else next(left))]
            for each in parts
        ]

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a text, each with whether it is one token as it stands."""
        chunks = self._cut(text)  # text, token, text, ..., token, text
        for number in range(1, len(chunks), 2):
            token = self._added[chunks[number]]
            if token.lstrip:
                chunks[number - 1] = chunks[number - 1].rstrip()
            if token.rstrip:
                chunks[number + 1] = chunks[number + 1].lstrip()
        for number, chunk in enumerate(chunks):
            code = _CODE.match(chunk) if number % 2 == 0 else None
            if code:
                yield code[0], True
                chunk = chunk[code.end() :]
            yield chunk, number % 2 == 1

    def _decode(self, sentence: Sequence[int]) -> str:
        tokens = [int(token) for token in sentence]
        if self.eos_id in tokens:
            tokens = tokens[: tokens.index(self.eos_id)]
        text = ""
        pieces: list[str] = []
        for piece in (self._piece(token) for token in tokens if token not in self._special_ids):
            # A second token of the same name is none of SentencePiece's.
            if piece in self._special:
                text += f"{self._decoder.decode_pieces(pieces)}{piece} "
                pieces = []
            else:
                pieces.append(piece)
        text += self._decoder.decode_pieces(pieces)
        text = text.replace(SPACE, " ").strip()
        if self._cleans_up:
            for before, after in _CLEANED:
                text = text.replace(before, after)
        return text

    def _piece(self, token: int) -> str:
        if token in self._names:
            return self._names[token]
        return self._decoder.id_to_piece(token) if token < self._decoder.vocab_size() else ""


@dataclasses.dataclass(frozen=True)
class _AddedToken:
    """A token that is found in text before SentencePiece sees it."""

    content: str
    lstrip: bool = False
    """Whether it takes the spaces before it along."""
    rstrip: bool = False
    """Whether it takes the spaces after it along."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "_AddedToken":
        """From a JSON object with its properties."""
        if value.get("single_word"):
            raise UserError(f"the token {value['content']!r} is single_word, which is not known")
        return cls(value["content"], value.get("lstrip", False), value.get("rstrip", False))


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What the files say besides pieces and ids."""

    values: Mapping[str, Any]
    """`tokenizer_config.json`, with what older versions of transformers wrote elsewhere."""
    own_ids: Mapping[int, _AddedToken]
    """Tokens that were added to the vocabulary, or are in it and special."""

    @classmethod
    def read(cls, files: TokenizerFiles, label: Callable[[str], Path]) -> "_Settings":
        """Reads the JSON files.

        Raises:
          UserError: one is damaged, or asks for something that is not known here.
        """
        values = dict(_DEFAULTS) | _read_json(files, TOKENIZER_CONFIG, label)
        try:
            if "added_tokens_decoder" in values:
                own = {
                    int(id): _AddedToken.of(token)
                    for id, token in values["added_tokens_decoder"].items()
                }
            else:
                values |= _read_json(files, "special_tokens_map.json", label)
                added = _read_json(files, "added_tokens.json", label)
                own = {int(id): _AddedToken(token) for token, id in added.items()}
            settings = cls(values, own)
            if not all(settings.special):
                raise UserError("a special token is empty")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{label(TOKENIZER_CONFIG)} is damaged: {error!r}") from error
        except UserError as error:
            raise UserError(f"{label(TOKENIZER_CONFIG)}: {error}") from error
        if values.get("sp_model_kwargs"):
            raise UserError(
                f"{label(TOKENIZER_CONFIG)}: sp_model_kwargs is not known here: remove it"
            )
        return settings

    @property
    def separate(self) -> bool:
        """Whether source and target have ids of their own."""
        return bool(self.values.get("separate_vocabs"))

    @property
    def cleans_up(self) -> bool:
        """Whether decoding takes spaces before punctuation away."""
        return bool(self.values.get("clean_up_tokenization_spaces"))

    @functools.cached_property
    def special(self) -> list[str]:
        """All special tokens, each once."""
        own = [name for name in self.values if name.endswith("_token") and name not in _SPECIAL]
        named = [self.values.get(name) for name in (*_SPECIAL, *own)]
        extra = self.values.get(
            "extra_special_tokens", self.values.get("additional_special_tokens")
        )
        more = extra.values() if isinstance(extra, Mapping) else extra or ()
        given = [token for token in (*named, *more) if token is not None]
        return list(dict.fromkeys(map(_content, given)))

    def is_separate(self, side: str) -> bool:
        """Whether a side has ids other than those of `vocab.json`."""
        return self.separate and side == "target"

    def token(self, name: str) -> str:
        """The special token with this name."""
        return _content(self.values[name])

    def added_tokens(self, vocabulary: Mapping[str, int]) -> dict[int, _AddedToken]:
        """By id, all tokens that are found in text before SentencePiece sees it.

        Special tokens that the vocabulary lacks get the ids after it.
        """
        added = dict(self.own_ids)
        ids = dict(vocabulary) | {token.content: id for id, token in added.items()}
        known = {token.content for token in added.values()}
        for token in self.special:
            if token not in known:
                added[ids.setdefault(token, len(ids))] = _AddedToken(token)
        return added

    def cutter(self, added: Mapping[str, _AddedToken]) -> Callable[[str], list[str]]:
        """The function that cuts a text into text, token, text, ..., token, text."""
        if self.values.get("split_special_tokens"):
            return lambda text: [text]
        # Of tokens that begin at one place the longest is found.
        longest_first = sorted(added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})").split


def _content(token: str | Mapping[str, Any]) -> str:
    """The text of a special token; its properties, which may stand there, have no effect."""
    return token if isinstance(token, str) else token["content"]


def read_files(folder: str | Path) -> TokenizerFiles:
    """The files of a folder that say something about its tokenizer.

    Raises:
      UserError: one that every such folder has is missing, or cannot be read.
    """
    try:
        files = {
            name: Path(folder, name).read_bytes() for name in _FILES if Path(folder, name).exists()
        }
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    for name in _REQUIRED_FILES:
        if name not in files:
            raise UserError(f"the tokenizer {Path(folder, name)} is missing")
    return files


def _read_json(files: TokenizerFiles, name: str, label: Callable[[str], Path]) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    try:
        values = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{label(name)} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{label(name)} is damaged: no JSON object")
    return values


def _read_vocabulary(
    files: TokenizerFiles, name: str, label: Callable[[str], Path]
) -> dict[str, int]:
    if name not in files:
        raise UserError(f"the vocabulary {label(name)} is missing")
    vocabulary = _read_json(files, name, label)
    if not vocabulary or not all(type(id) is int and id >= 0 for id in vocabulary.values()):
        raise UserError(f"{label(name)} is damaged: it does not give an id to each piece")
    return vocabulary


def _fingerprint(files: TokenizerFiles) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
