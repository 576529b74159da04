"""Vocabularies of ByT5, equivalent to `ByT5Tokenizer` in transformers.

A token is a byte of UTF-8, or a special token, which also stands for its name in a text.

Source: Hugging Face transformers 5 (models/byt5/tokenization_byt5.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    ADDED_TOKENS,
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    TokenizerFiles,
    read_object,
)
from flaxformer_mt.data.tokenizers.sentencepiece_model import BYTES, byte_model, shown_byte
from flaxformer_mt.errors import UserError

FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", ADDED_TOKENS)

_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""In the order of their ids, which those of the bytes follow."""
_FIRST_BYTE = len(_SPECIAL)
_EXTRA = 125
"""The number of tokens after the bytes, unless the settings have it."""


class ByT5Tokenizer(MarianTokenizer):
    """The source or target side of a vocabulary."""

    _code = re.compile("(?!)")

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side; `folder` is that of the files, for messages."""
        settings = read_object(files, TOKENIZER_CONFIG, folder)
        if settings.get("tokenizer_class") != type(self).__name__:
            raise UserError(
                f"{Path(folder)} has no vocabulary file: only {type(self).__name__} needs none, "
                f"and {TOKENIZER_CONFIG} has tokenizer_class={settings.get('tokenizer_class')}"
            )
        settings = _with_defaults(settings)
        names = [token["content"] for token in map(_token, map(settings.get, _SPECIAL))]
        ids = {name: number for number, name in enumerate([*names, *BYTES])}
        model = byte_model()
        made = {
            **dict.fromkeys(("source.spm", "target.spm"), model),
            VOCABULARY_FILE: json.dumps(ids).encode(),
            TOKENIZER_CONFIG: json.dumps(settings).encode(),
        }
        super().__init__({**files, **made}, side, folder)
        self.files = files
        self.model = None  # Ids are not those of the SentencePiece model.

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [*map(shown_byte, super().pieces(tokens))]

    def entries(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token - _FIRST_BYTE) if self._is_byte(token) else self._piece(token)
                for token in map(int, tokens)]  # fmt: skip

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        return [[*map(shown_byte, pieces)] for pieces in super().split(texts)]

    def _is_byte(self, token: int) -> bool:
        return _FIRST_BYTE <= token < _FIRST_BYTE + len(BYTES)

    def _decode(self, sentence: Sequence[int]) -> str:
        parts = [
            bytes([token - _FIRST_BYTE]) if self._is_byte(token) else self._piece(token).encode()
            for token in self.until_end(sentence)
            if token not in self.special_ids
        ]
        return b"".join(parts).decode(errors="ignore")


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with the special tokens that transformers adds."""
    named = {name: settings.get(name) or default for name, default in _SPECIAL.items()}
    extra = [f"<extra_id_{number}>" for number in range(settings.get("extra_ids", _EXTRA))]
    known = settings.get("extra_special_tokens", settings.get("additional_special_tokens"))
    added = {str(number): _token(token) for number, token in enumerate(named.values())}
    return {
        **settings,
        **named,
        "extra_special_tokens": extra if known is None else known,
        "added_tokens_decoder": added | settings.get("added_tokens_decoder", {}),
    }


def _token(token: Any) -> dict[str, Any]:
    """Returns a special token, with the spaces around it that transformers removes."""
    return dict(token) if isinstance(token, Mapping) else {
        "content": token, "lstrip": True, "rstrip": True,
    }  # fmt: skip
