"""Vocabularies of M2M-100, equivalent to `M2M100Tokenizer` in transformers.

SentencePiece splits texts into pieces, and a JSON file maps pieces to ids. After these follow the
tokens of the languages, "__en__", with which sentences begin.

Source: Hugging Face transformers 5 (models/m2m_100/tokenization_m2m_100.py).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    TokenizerFiles,
    read_object,
    require,
)
from flaxformer_mt.errors import UserError

PIECES_FILE = "sentencepiece.bpe.model"
FILES = (
    PIECES_FILE, VOCABULARY_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip

LANGUAGES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
        "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
        "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl "
        "tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
"""The languages of each published set, in the order of their tokens."""
_LANGUAGE = re.compile(r"__([a-z]+)__(?: |$)")


class M2M100Tokenizer(MarianTokenizer):
    """The source or target side of a vocabulary."""

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side, which decides the language."""
        require(files, (PIECES_FILE, VOCABULARY_FILE), folder)
        pieces = dict.fromkeys(("source.spm", "target.spm"), files[PIECES_FILE])
        super().__init__({**files, **pieces}, side, folder)
        self.files = files
        self.model = None  # Ids are not those of the SentencePiece model.
        label = Path(folder, TOKENIZER_CONFIG)
        settings = read_object(files, TOKENIZER_CONFIG, folder)
        known = LANGUAGES.get(settings.get("language_codes", "m2m100"))
        if known is None:
            raise UserError(f"{label} has language_codes={settings['language_codes']!r}: unknown")
        start = len(read_object(files, VOCABULARY_FILE, folder))
        self._languages = {code: start + number for number, code in enumerate(known.split())}
        self._names |= {token: f"__{code}__" for code, token in self._languages.items()}
        self.language_ids = frozenset(self._languages.values())
        self.special_ids |= self.language_ids
        self.vocab_size = start + len(self._languages)
        self.bos_id = self.eos_id
        default = "en" if side == "source" else None
        language = settings.get("src_lang" if side == "source" else "tgt_lang") or default
        if language is not None and language not in self._languages:
            raise UserError(f"{label} has the language {language!r}, of which there is no token")
        self.first_id = None if language is None else self._languages[language]
        self.fingerprint = f"{self.fingerprint}-{self.first_id}"

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        languages, rest = self._languages_of(texts)
        return [
            [*language, *tokens]
            for language, tokens in zip(languages, super().encode_parts(rest), strict=True)
        ]

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        languages, rest = self._languages_of(texts)
        default = [] if self.first_id is None else [self.first_id]
        return [
            [*self.pieces(language or default), *pieces]
            for language, pieces in zip(languages, super().split(rest), strict=True)
        ]

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        languages, rest = self._languages_of(texts)
        return [
            self.with_first([*language, *tokens])
            for language, tokens in zip(languages, super().sample(rest, seed, amount), strict=True)
        ]

    def _languages_of(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Returns the token of the language that each text begins with, if any, and the rest."""
        languages, rest = [], []
        for text in texts:
            found = _LANGUAGE.match(text)
            token = self._languages.get(found[1]) if found else None
            languages.append([] if token is None else [token])
            rest.append(text[found.end() :] if found and token is not None else text)
        return languages, rest
