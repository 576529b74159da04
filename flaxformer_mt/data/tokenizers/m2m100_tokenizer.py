"""Vocabularies of M2M-100, equivalent to `M2M100Tokenizer` in transformers.

SentencePiece splits texts into pieces, and a JSON file maps pieces to ids. After these follow the
tokens of the languages, "__en__", with which sentences begin.

Source: Hugging Face transformers 5 (models/m2m_100/tokenization_m2m_100.py).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    ADDED_TOKENS,
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
    PIECES_FILE, VOCABULARY_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", ADDED_TOKENS,
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
_LANGUAGE = re.compile(r"(__\w+?__)(?: |$)")


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
        self._languages = {f"__{code}__": id for id, code in enumerate(known.split(), start)}
        added = {name: self._ids[name] for name in self._added if _LANGUAGE.fullmatch(name)}
        self._languages |= added
        self._ids |= self._languages
        self._names |= {token: name for name, token in self._languages.items()}
        self.language_ids = frozenset(self._languages.values())
        self.special_ids |= self.language_ids
        self.vocab_size = max(self._ids.values()) + 1
        self.bos_id = self.eos_id
        default = "en" if side == "source" else None
        language = settings.get("src_lang" if side == "source" else "tgt_lang") or default
        if language is not None:
            self.first_id = self._languages.get(f"__{language}__")
            if self.first_id is None:
                raise UserError(f"{label} has the language {language!r}, which has no token")
        self.fingerprint = f"{self.fingerprint}-{self.first_id}"

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        default = [] if self.first_id is None else self.pieces([self.first_id])
        return [
            pieces if pieces and pieces[0] in self._languages else [*default, *pieces]
            for pieces in super().split(texts)
        ]

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        found = _LANGUAGE.match(text)
        if found and found[1] in self._languages:
            yield found[1], True
            text = text[found.end() :]
        yield from super()._parts(text)
