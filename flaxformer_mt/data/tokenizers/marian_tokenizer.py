"""Vocabularies of OPUS-MT models, equivalent to `MarianTokenizer` in transformers.

Texts are split into pieces by SentencePiece, with separate models for sources and targets; JSON
files map pieces to ids. Special tokens in a text ("</s>") and a language code at its beginning
(">>fra<<") are tokens of their own.

Source: Hugging Face transformers 5 (models/marian/tokenization_marian.py, tokenization_python.py),
whose results are reproduced for any text. (As there, calling `normalize` is left to the user.)
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypeAlias, TypedDict

import msgspec

from flaxformer_mt.config.fields import MAX_VOCABULARY
from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, TextSampler, open_model
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import parse_json

VOCABULARY_FILE, TARGET_VOCABULARY_FILE = "vocab.json", "target_vocab.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"

_REQUIRED_FILES = ("source.spm", "target.spm", VOCABULARY_FILE)
FILES = (
    *_REQUIRED_FILES,
    TARGET_VOCABULARY_FILE,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    ADDED_TOKENS,
)
"""The tokenizer files of a Hugging Face folder."""

# In the order in which tokens that are missing from the vocabulary get ids.
_SPECIAL = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
MAX_ADDED_TOKENS = 10_000
"""Limit of the tokens that are matched before SentencePiece is applied, by a regular expression."""

_DEFAULTS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What `clean_up_tokenization_spaces` replaces in a decoded text, in this order."""

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCABULARY)]
"""In schemas: of a token."""
Vocabulary: TypeAlias = Annotated[dict[str, Id], msgspec.Meta(min_length=1)]
"""The schema of `vocab.json`."""


class _Token(TypedDict, total=False):
    content: Required[str]
    lstrip: bool
    rstrip: bool
    single_word: bool


class TokenizerConfig(TypedDict, total=False):
    """The schema of what is read of `tokenizer_config.json`."""

    tokenizer_class: str | None
    source_lang: str | None
    target_lang: str | None
    src_lang: str | None
    tgt_lang: str | None
    langs: list[str] | None
    language_codes: str
    separate_vocabs: bool | None
    clean_up_tokenization_spaces: bool | None
    split_special_tokens: bool | None
    legacy_behaviour: bool | None
    sp_model_kwargs: dict[str, Any] | None
    added_tokens_decoder: dict[Annotated[str, msgspec.Meta(pattern="^-?[0-9]{1,9}$")], _Token]
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None
    additional_special_tokens: list[str | _Token] | None


TokenizerFiles = Mapping[str, bytes]
"""The contents of the tokenizer files that exist, by name."""
SplitTexts = Callable[[list[str]], list[list[str]]]
"""Function from texts without special tokens to their pieces."""


class MarianTokenizer(Tokenizer):
    """The source or target side of an OPUS-MT vocabulary.

    Attributes:
      vocab_size: the highest id plus 1. Ids may have gaps.
      special_ids: tokens that are not part of a decoded text.
      hidden: pieces of the vocabulary whose ids are those of added tokens, by id. (Added tokens
        have the ids of the source, which a target vocabulary of its own may give to pieces.)
      cleans_up: whether `CLEANED` is applied to a decoded text.
      decoder_file: the SentencePiece model that joins pieces to a text.
    """

    _code = re.compile(">>.*?<<", re.DOTALL)
    """A language at the beginning of a text."""

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side; `folder` is that of the files, for messages."""
        require(files, _REQUIRED_FILES, folder)
        self.files = files
        settings = _Settings.read(files, folder)
        name = f"{side}.spm"
        self.model = files[name]
        self._processor = open_model(files[name], str(Path(folder, name)))
        self._sampler = TextSampler(self._processor)
        is_separate = bool(settings.values.get("separate_vocabs"))
        vocabulary_name = VOCABULARY_FILE
        if is_separate and side == "target":
            vocabulary_name = TARGET_VOCABULARY_FILE
        vocabulary = _read_vocabulary(files, vocabulary_name, folder)
        # On both sides, the ids of special tokens are those of the source.
        added = settings.added_tokens(_read_vocabulary(files, VOCABULARY_FILE, folder))
        self._added = {token.content: token for token in added.values()}
        self.cleans_up = bool(settings.values.get("clean_up_tokenization_spaces"))
        self._split_at_tokens = settings.splitter(self._added)

        added_ids = {token.content: id for id, token in added.items()}
        for token in settings.special:
            if token not in added_ids:  # Its id, that after all others, is that of another token.
                raise UserError(f"{Path(folder, VOCABULARY_FILE)} has no {token}")
        self._ids = vocabulary | added_ids
        self._names = {id: piece for piece, id in vocabulary.items()}
        self.hidden = {
            id: self._names[id]
            for id, token in added.items()
            if self._names.get(id, token.content) != token.content
        }
        self._names |= {id: token.content for id, token in added.items()}
        self._special = frozenset(settings.special)
        self.special_ids = {added_ids[token] for token in settings.special}
        self.vocab_size = max(self._ids.values()) + 1
        if settings.token("unk_token") not in vocabulary:
            raise UserError(f"{Path(folder, vocabulary_name)} has no {settings.token('unk_token')}")
        self.unk_id = vocabulary[settings.token("unk_token")]
        self.pad_id = self.bos_id = added_ids[settings.token("pad_token")]
        self.eos_id = added_ids[settings.token("eos_token")]

        # With a shared vocabulary, Hugging Face decodes targets with the source model as well.
        self.decoder_file = name if is_separate else "source.spm"
        self._decoder = open_model(files[self.decoder_file], str(Path(folder, self.decoder_file)))
        used = {
            name,
            self.decoder_file,
            vocabulary_name,
            *FILES[len(_REQUIRED_FILES) + 1 :],
        }
        digest = hashlib.sha256()
        for name in sorted(used & files.keys()):
            digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
        self.fingerprint = digest.hexdigest()

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, self._split)

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        return self._tokenize(texts, self._split)

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        def split(chunks: list[str]) -> list[list[str]]:
            return self._sampler.sample_pieces(chunks, seed, amount)

        return [self.with_first(tokens) for tokens in self._encode(texts, split)]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return [self._decode(sentence) for sentence in sentences]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self._piece(int(token)) for token in tokens]

    def _split(self, chunks: list[str]) -> list[list[str]]:
        return self._processor.encode(chunks, out_type=str)

    def _encode(self, texts: Sequence[str], split: SplitTexts) -> list[list[int]]:
        return [
            [self._ids.get(piece, self.unk_id) for piece in pieces]
            for pieces in self._tokenize(texts, split)
        ]

    def _tokenize(self, texts: Sequence[str], split: SplitTexts) -> list[list[str]]:
        """Returns the tokens of each text, whether they are in the vocabulary or not."""
        parts = [list(self._parts(text)) for text in texts]
        remaining = iter(split([part for each in parts for part, whole in each if not whole]))
        return [
            [piece for part, whole in each for piece in ([part] if whole else next(remaining))]
            for each in parts
        ]

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the parts of a text, each with whether it is a single token."""
        chunks = self._split_at_tokens(text)  # text, token, text, ..., token, text
        for number in range(1, len(chunks), 2):
            token = self._added[chunks[number]]
            if token.lstrip:
                chunks[number - 1] = chunks[number - 1].rstrip()
            if token.rstrip:
                chunks[number + 1] = chunks[number + 1].lstrip()
        for number, chunk in enumerate(chunks):
            code = self._code.match(chunk) if number % 2 == 0 else None
            if code:
                yield code[0], True
                chunk = chunk[code.end() :]
            yield chunk, number % 2 == 1

    def _decode(self, sentence: Sequence[int]) -> str:
        text = ""
        pieces: list[str] = []
        tokens = self.until_end(sentence)
        for piece in (self._piece(token) for token in tokens if token not in self.special_ids):
            # Special tokens are not pieces of the SentencePiece model.
            if piece in self._special:
                text += f"{self._decoder.decode_pieces(pieces)}{piece} "
                pieces = []
            else:
                pieces.append(piece)
        text += self._decoder.decode_pieces(pieces)
        text = text.replace(SPACE, " ").strip()
        return clean_up(text) if self.cleans_up else text

    def _piece(self, token: int) -> str:
        if token in self._names:
            return self._names[token]
        return self._decoder.id_to_piece(token) if token < self._decoder.vocab_size() else ""


@dataclasses.dataclass(frozen=True)
class _AddedToken:
    """A token that is matched before SentencePiece is applied, and the adjacent spaces removed."""

    content: str
    lstrip: bool = False
    rstrip: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "_AddedToken":
        if value.get("single_word"):
            raise UserError(
                f"the token {value['content']!r} is single_word, which is not supported"
            )
        return cls(content(value), value.get("lstrip", False), value.get("rstrip", False))


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings of a tokenizer, besides pieces and ids."""

    values: Mapping[str, Any]
    """`tokenizer_config.json`, merged with the files of older versions of transformers."""
    own_ids: Mapping[int, _AddedToken]
    """Added tokens and special tokens, by id."""

    @classmethod
    def read(cls, files: TokenizerFiles, folder: str) -> "_Settings":
        values = dict(_DEFAULTS) | read_object(files, TOKENIZER_CONFIG, folder, TokenizerConfig)
        by_id, by_name = values.get("added_tokens_decoder"), {}
        if by_id is None:
            values |= read_object(files, "special_tokens_map.json", folder, TokenizerConfig)
            by_name = read_object(files, ADDED_TOKENS, folder, dict[str, Id])
        with prefixed(f"{Path(folder, TOKENIZER_CONFIG)}: "):
            own = {id: _AddedToken(token) for token, id in by_name.items()}
            own |= {int(id): _AddedToken.of(token) for id, token in (by_id or {}).items()}
            settings = cls(values, own)
            settings.check()
        return settings

    @functools.cached_property
    def special(self) -> list[str]:
        own = [name for name in self.values if name.endswith("_token") and name not in _SPECIAL]
        named = [self.values.get(name) for name in (*_SPECIAL, *own)]
        extra = self.values.get(
            "extra_special_tokens", self.values.get("additional_special_tokens")
        )
        more = extra.values() if isinstance(extra, Mapping) else extra or ()
        given = [token for token in (*named, *more) if token is not None]
        return list(dict.fromkeys(map(content, given)))

    def check(self) -> None:
        if self.values.get("sp_model_kwargs"):
            raise UserError("sp_model_kwargs is not supported")
        for name in _DEFAULTS:
            if self.values[name] is None:
                raise UserError(f"it has no {name}")
        for token in (*self.special, *(token.content for token in self.own_ids.values())):
            if not token:
                raise UserError("a special token is empty")
        for id in self.own_ids:
            if not 0 <= id < MAX_VOCABULARY:
                raise UserError(f"the id of an added token is {id}")
        if len(self.special) + len(self.own_ids) > MAX_ADDED_TOKENS:
            raise UserError(f"it has more than {MAX_ADDED_TOKENS} added tokens")

    def token(self, name: str) -> str:
        return content(self.values[name])

    def added_tokens(self, vocabulary: Mapping[str, int]) -> dict[int, _AddedToken]:
        """Returns all tokens that are matched before SentencePiece is applied, by id.

        Special tokens that are missing from the vocabulary get the ids after it.
        """
        added = dict(self.own_ids)
        ids = dict(vocabulary) | {token.content: id for id, token in added.items()}
        known = {token.content for token in added.values()}
        for token in self.special:
            if token not in known:
                added[ids.setdefault(token, len(ids))] = _AddedToken(token)
        return added

    def splitter(self, added: Mapping[str, _AddedToken]) -> Callable[[str], list[str]]:
        """Returns a function that splits a text into text, token, text, ..., token, text."""
        if self.values.get("split_special_tokens"):
            return lambda text: [text]
        # At each position, the longest token matches.
        longest_first = sorted(added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})").split


def clean_up(text: str) -> str:
    """Removes the spaces of `CLEANED`."""
    for before, after in CLEANED:
        text = text.replace(before, after)
    return text


def content(token: str | Mapping[str, Any]) -> str:
    """Returns the text of a special token in the settings."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise UserError(f"a special token is {token!r}, not a text")
    return text


def require(files: TokenizerFiles, names: Sequence[str], folder: str) -> None:
    """Raises `UserError` if one of the files is missing."""
    for name in names:
        if name not in files:
            raise UserError(f"the tokenizer {Path(folder, name)} is missing")


def read_object(
    files: TokenizerFiles, name: str, folder: str, kind: Any = dict[str, Any]
) -> dict[str, Any]:
    """Parses a JSON object of a kind; a missing file gives an empty one."""
    return parse_json(files.get(name, b"{}"), str(Path(folder, name)), kind)


def _read_vocabulary(files: TokenizerFiles, name: str, folder: str) -> dict[str, int]:
    if name not in files:
        raise UserError(f"the vocabulary {Path(folder, name)} is missing")
    vocabulary = read_object(files, name, folder, Vocabulary)
    pieces: dict[int, str] = {}
    for piece, id in vocabulary.items():
        if pieces.setdefault(id, piece) != piece:
            raise UserError(
                f"{Path(folder, name)} is damaged: {pieces[id]!r} and {piece!r} have the same id, "
                f"{id}"
            )
    return vocabulary
