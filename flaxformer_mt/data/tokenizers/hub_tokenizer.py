"""Vocabularies of the Hugging Face Hub that are one `tokenizer.json`: NLLB, T5, BART, Gemma.

The library `tokenizers` reads the file, as it does for transformers, so that any text has the same
tokens. Sentences of multilingual vocabularies begin with the token of their language, by default
that of the settings: "fra_Latn Bonjour".
"""

import contextlib
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    ADDED_TOKENS,
    TOKENIZER_CONFIG,
    TokenizerFiles,
    clean_up,
    content,
    read_object,
)
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE
from flaxformer_mt.errors import UserError, first_line, prefixed, requiring

if TYPE_CHECKING:
    import tokenizers

VOCABULARY_FILE = "tokenizer.json"
FILES = (
    VOCABULARY_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", ADDED_TOKENS,
    "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
)  # fmt: skip
"""The tokenizer files of a folder. Only the first two are read, the others are kept."""
EARLIER = (("spiece.model",), ("sentencepiece.bpe.model",), ("vocab.json", "merges.txt"))
"""Files of earlier versions instead of the first, from which transformers makes it."""
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Special tokens, unless they are in the settings."""
_SOURCE_LANGUAGES = {"NllbTokenizer": "eng_Latn", "MBart50Tokenizer": "en_XX"}
"""The source language of each class of multilingual vocabularies, unless it is in the settings."""
_BYTE_LEVEL = {"BartTokenizer": "<s>", "RobertaTokenizer": "<s>"}
_FIRST = {**_SOURCE_LANGUAGES, **_BYTE_LEVEL, "T5Tokenizer": None, "PegasusTokenizer": None}
"""What sentences begin with, by the class of the tokenizer. transformers ends them with `</s>`, and
ignores the post-processor of `tokenizer.json`, which all other classes follow."""
_NO_CLASS = "None"
_WITHOUT_END = "GemmaTokenizer"
"""The class whose sources have no end, and whose start token is that of decoding as well."""
_GENERAL = ("PreTrainedTokenizer", "TokenizersBackend", _WITHOUT_END)
"""Classes of vocabularies of any kind."""
LANGUAGE_LAST = ("MBartTokenizer", "PLBartTokenizer")
"""Classes whose sentences end with their language."""
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]+(_\w+)?")
"""The usual names of languages in these vocabularies."""
_WORD = re.compile(r"[a-z][\w-]*")
"""Other names of languages: special tokens, but not "<mask>" or "[ENT]"."""


LAST_LANGUAGE_REFUSED = (
    "a vocabulary that puts the language after the end of a sentence is not supported"
)
_BYTE_LEVEL_SPACE = "\u0120"
"""How pieces of byte-level vocabularies begin that follow a space."""


class HubTokenizer(Tokenizer):
    """The source or target side of a vocabulary.

    Attributes:
      note: what of the settings is not followed, in a line; "" = nothing.
      is_byte_level: whether each character of an entry stands for a byte.
    """

    note = ""

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side; `folder` is that of the files, for messages."""
        with requiring(VOCABULARY_FILE, "'flaxformer_mt[hub]'", "tokenizers"):
            import tokenizers
        self.files = files
        label, settings_label = Path(folder, VOCABULARY_FILE), Path(folder, TOKENIZER_CONFIG)
        self._usable = functools.partial(_usable, label)
        with self._usable(), _without_panic_messages():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[VOCABULARY_FILE])
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            tried = self._tokenizer.encode("a", add_special_tokens=False)
            self._tokenizer.decode(tried.ids)
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        settings = read_object(files, TOKENIZER_CONFIG, folder)
        kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if kind in LANGUAGE_LAST or settings.get("legacy_behaviour"):
            raise UserError(f"{settings_label}: {LAST_LANGUAGE_REFUSED}")
        self.is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        if kind in _FIRST and self.is_byte_level != (kind in _BYTE_LEVEL):
            raise UserError(
                f"{settings_label}: tokenizer_class={kind} does not fit {VOCABULARY_FILE}, which "
                f"is {'' if self.is_byte_level else 'not '}a byte-level vocabulary: remove "
                "tokenizer_class"
            )
        self._own_space = _BYTE_LEVEL_SPACE if self.is_byte_level else SPACE
        self._cleans_up = bool(settings.get("clean_up_tokenization_spaces"))
        self.vocab_size = max(ids, default=-1) + 1
        with prefixed(f"{settings_label}: "):
            named = {
                name: content(settings.get(name) or default) for name, default in _SPECIAL.items()
            }
        self.pad_id, self.eos_id, self.unk_id = (self._id(name, label) for name in named.values())
        last = [] if kind == _WITHOUT_END else [named["eos_token"]]
        first = _FIRST[kind] if kind in _FIRST else self._first_of_template(label, last)
        self.bos_id = self.pad_id if first is None else self.eos_id
        self._has_end = kind != _WITHOUT_END
        if not self._has_end:
            self.bos_id = self._id(content(settings.get("bos_token") or "<bos>"), label)
            first = first if side == "source" else None
        languages = self._languages(settings)
        if kind in _SOURCE_LANGUAGES or first in languages:
            self.language_ids = frozenset(languages.values())
            if kind in (*_SOURCE_LANGUAGES, _NO_CLASS):
                source = settings.get("src_lang") or first
                first = source if side == "source" else settings.get("tgt_lang")
        self.first_id = None if first is None else self._id(str(first), label)
        follows_template = kind not in (*_FIRST, _NO_CLASS)
        if follows_template and (self.language_ids or kind not in _GENERAL):
            self.note = (
                f"tokenizer_class={kind} has no rules of its own: as in transformers, sentences "
                f"begin with {first or 'their first piece'}, as the post-processor of "
                f"{VOCABULARY_FILE} says"
            )
            if self.language_ids:
                self.note += (
                    "; to follow src_lang and tgt_lang, set tokenizer_class to "
                    f"{' or '.join(_SOURCE_LANGUAGES)}"
                )
        digest = hashlib.sha256(files[VOCABULARY_FILE])
        digest.update(f"{named} {self.first_id} {self._cleans_up}".encode())
        self.fingerprint = digest.hexdigest()

    def with_source_end(self, tokens: Sequence[int]) -> list[int]:
        return super().with_source_end(tokens) if self._has_end or not tokens else list(tokens)

    def _first_of_template(self, label: Path, expected: list[str]) -> str | None:
        """Returns the token that the post-processor puts before a sentence, if any.

        UserError unless it puts those that are `expected` after it.
        """
        encoding = self._tokenizer.encode("a")
        added = list(zip(encoding.tokens, encoding.special_tokens_mask, strict=True))
        first, last = (
            [token for token, _ in itertools.takewhile(lambda each: each[1], order)]
            for order in (added, reversed(added))
        )
        if last != expected or len(first) > 1:
            names = [" ".join(tokens) or "nothing" for tokens in (first, reversed(last))]
            raise UserError(
                f"{label}: its post-processor puts {names[0]} before sentences and {names[1]} "
                f"after them: only one token before and {' '.join(expected) or 'nothing'} after "
                "them are supported"
            )
        return first[0] if first else None

    def _languages(self, settings: Mapping[str, Any]) -> dict[str, int]:
        """Returns the ids of the tokens that name languages, where there are languages."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        chosen = (settings.get("src_lang"), settings.get("tgt_lang"))
        return {
            entry.content: token
            for token, entry in added
            if _LANGUAGE.fullmatch(entry.content)
            or (entry.special and _WORD.fullmatch(entry.content))
            or entry.content in chosen
        }

    def _id(self, token: str, label: Path) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(f"{label} has no {token}")
        return int(found)

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(encoding.ids) for encoding in self._encodings(texts)]

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        return [
            self._split(text, encoding)
            for text, encoding in zip(texts, self._encodings(texts), strict=True)
        ]

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        raise UserError(f"data.subword_sampling={amount} needs another vocabulary: set it to 0")

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        with self._usable():
            texts = self._tokenizer.decode_batch([self.until_end(tokens) for tokens in sentences])
        return [clean_up(text) for text in texts] if self._cleans_up else texts

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self._with_space(name) for name in self.entries(tokens)]

    def entries(self, tokens: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(int(token)) or "" for token in tokens]

    def _encodings(self, texts: Sequence[str]) -> "list[tokenizers.Encoding]":
        with self._usable():
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def _split(self, text: str, encoding: "tokenizers.Encoding") -> list[str]:
        pieces = [
            text[slice(*span)] if token == self.unk_id else self._with_space(piece)
            for token, piece, span in zip(
                encoding.ids, encoding.tokens, encoding.offsets, strict=True
            )
        ]
        tokens = self.with_first(encoding.ids)
        return [*self.pieces(tokens[: len(tokens) - len(pieces)]), *pieces]

    def _with_space(self, piece: str) -> str:
        """Returns a piece with U+2581 instead of the vocabulary's own mark of a space."""
        if piece.startswith(self._own_space):
            return SPACE + piece.removeprefix(self._own_space)
        return piece


def completed(files: TokenizerFiles, folder: str) -> TokenizerFiles:
    """Returns the files of a folder with `tokenizer.json`, made by transformers if it is missing.

    Raises:
      UserError: transformers is not installed, or cannot read the folder.
    """
    if VOCABULARY_FILE in files:
        return files
    names = " and ".join(name for name in files if any(name in names for names in EARLIER))
    label = Path(folder, VOCABULARY_FILE)
    with requiring(f"{label} is missing; to make it from {names}", "transformers"):
        import transformers
    with _usable(Path(folder, names), "cannot be read by transformers"):
        made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        content = made.backend_tokenizer.to_str().encode()
    return {**files, VOCABULARY_FILE: content}


@contextlib.contextmanager
def _usable(label: Path, problem: str = "is damaged") -> Iterator[None]:
    """Turns an error of the library into `UserError`; it also raises a `BaseException`, a panic."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise UserError(f"{label} {problem}: {first_line(error)}") from error


@contextlib.contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Discards what Rust writes to standard error, whatever Python has there."""
    own = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
