"""Vocabularies of FSMT (fairseq's models of WMT 2019), equivalent to `FSMTTokenizer`.

Moses' rules, as in sacremoses, split a text into words, and byte pair encoding splits these into
pieces, of which the last of each word ends with "</w>". Each side has its language and vocabulary.
(`FSMTTokenizer` encodes targets with the rules and the vocabulary of the source.)

Source: Hugging Face transformers 5 (models/fsmt/tokenization_fsmt.py).
"""

import io
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    ADDED_TOKENS,
    TARGET_VOCABULARY_FILE,
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    TokenizerFiles,
    clean_up,
    read_object,
    require,
)
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, byte_model
from flaxformer_mt.errors import UserError, requiring

FILES = (
    "vocab-src.json", "vocab-tgt.json", "merges.txt", TOKENIZER_CONFIG, "special_tokens_map.json",
    ADDED_TOKENS,
)  # fmt: skip

_END = "</w>"
_PUNCTUATION = str.maketrans(
    {
        **dict(zip("，、∶：？）！（；～’━〈〉【】％", ",,::?)!(;~'-<>[]%", strict=True)),
        **dict.fromkeys("”“《》」「", '"'),
        **{chr(ord("０") + digit): str(digit) for digit in range(10)},
        "…": "...",
    }
)
_FULL_STOP = re.compile(r"[。．]\s*")


class FSMTTokenizer(MarianTokenizer):
    """The source or target side of a vocabulary."""

    _code = re.compile("(?!)")

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side; `folder` is that of the files, for messages."""
        require(files, FILES[:4], folder)
        label = Path(folder, TOKENIZER_CONFIG)
        settings = read_object(files, TOKENIZER_CONFIG, folder)
        languages = settings.get("langs")
        if not isinstance(languages, list) or list(map(type, languages)) != [str, str]:
            raise UserError(f"{label} has langs={languages!r}, not two languages")
        model = byte_model()  # It is not used.
        made = {
            **dict.fromkeys(("source.spm", "target.spm"), model),
            VOCABULARY_FILE: files["vocab-src.json"],
            TARGET_VOCABULARY_FILE: files["vocab-tgt.json"],
            TOKENIZER_CONFIG: json.dumps(settings | {"separate_vocabs": True}).encode(),
        }
        super().__init__({**files, **made}, side, folder)
        self.files = files
        self.model = None
        self.bos_id = self.eos_id
        self._lowers = bool(settings.get("do_lower_case"))
        merges = [line.split()[:2] for line in files["merges.txt"].decode().split("\n")[:-1]]
        codes = "\n".join(["#version: 0.2", *map(" ".join, merges), ""])
        with requiring(str(label.parent), "subword-nmt sacremoses"):
            import sacremoses
            from subword_nmt.apply_bpe import BPE
        self._bpe = BPE(io.StringIO(codes))
        language = languages[side == "target"]
        self._punctuation = sacremoses.MosesPunctNormalizer(lang=language)
        self._words = sacremoses.MosesTokenizer(lang=language)
        self._joined = sacremoses.MosesDetokenizer(lang=language)
        self.fingerprint = f"{self.fingerprint}-{language}"

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        return [_with_spaces(pieces) for pieces in super().split(texts)]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return _with_spaces(self.entries(tokens))

    def entries(self, tokens: Sequence[int]) -> list[str]:
        return super().pieces(tokens)

    def _split(self, chunks: list[str]) -> list[list[str]]:
        return [[*self._pieces_of(chunk)] for chunk in chunks]

    def _pieces_of(self, text: str) -> Iterable[str]:
        text = text.lower() if self._lowers else text
        text = _FULL_STOP.sub(". ", text.translate(_PUNCTUATION))
        text = self._punctuation.normalize(text)
        text = "".join(each for each in text if not unicodedata.category(each).startswith("C"))
        words = self._words.tokenize(
            text, aggressive_dash_splits=True, return_str=False, escape=True
        )
        for word in filter(None, words):
            *first, last = self._bpe.segment_tokens([word])
            yield from (piece.removesuffix(self._bpe.separator) for piece in first)
            yield last + _END

    def _piece(self, token: int) -> str:
        return self._names.get(token, self._names[self.unk_id])

    def _decode(self, sentence: Sequence[int]) -> str:
        tokens = [token for token in self.until_end(sentence) if token not in self.special_ids]
        words = "".join(self.entries(tokens)).replace(_END, " ").split()
        text = str(self._joined.detokenize(words))
        return clean_up(text) if self.cleans_up else text


def _with_spaces(pieces: Sequence[str]) -> list[str]:
    """Returns pieces with U+2581 where words begin, instead of a mark where they end."""
    begins = [True, *(piece.endswith(_END) for piece in pieces)]
    return [
        SPACE * is_first + piece.removesuffix(_END)
        for is_first, piece in zip(begins, pieces, strict=False)
    ]
