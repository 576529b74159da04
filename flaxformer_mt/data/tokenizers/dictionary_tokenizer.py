"""Vocabularies that are a list of tokens, as fairseq's `dict.txt` and those of OpenNMT-py 3.

A text is segmented into tokens by a SentencePiece model, by BPE codes of subword-nmt, or at its
spaces. The codes are of text that is split into words already, as by Moses.

Tokens and texts are those of the toolkit, but for the end token, which only the caller adds.

Source: fairseq/data/dictionary.py (`Dictionary.encode_line`, `string`); OpenNMT-py 3.5.1,
onmt/inputters (text_corpus.py, and `numericalize` in text_utils.py), onmt/transforms/tokenize.py
and onmt/translate/translation.py (`_build_target_tokens`)
"""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from flaxformer_mt.data.tokenizers.base import Tokenizer
from flaxformer_mt.data.tokenizers.marian_tokenizer import TokenizerFiles
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, TextSampler, open_model
from flaxformer_mt.errors import UserError, requiring

TOKENS_FILE, PIECES_FILE, CODES_FILE = "{side}.tokens", "{side}.spm", "{side}.codes"
"""The tokens of a side in the order of their ids, one a line; and what segments texts, if any."""
_OF_SIDE = (TOKENS_FILE, PIECES_FILE, CODES_FILE)
OPENNMT_FILE = "opennmt.start"
"""In vocabularies of OpenNMT-py, the token that decoding starts from."""
FILES = (*(name.format(side=s) for name in _OF_SIDE for s in ("source", "target")), OPENNMT_FILE)
_CONTINUES = "@@"
"""How pieces of words end in subword-nmt, unless they are the last ones."""


class DictionaryTokenizer(Tokenizer):
    """The source or target side of a vocabulary."""

    def __init__(
        self, files: TokenizerFiles, side: Literal["source", "target"], folder: str = ""
    ) -> None:
        """Creates the tokenizer of a side; `folder` is that of the files, for messages."""
        self.files = files
        names = [name.format(side=side) for name in _OF_SIDE]
        tokens_name, pieces_name, codes_name = names
        label = Path(folder, tokens_name)
        if tokens_name not in files:
            raise UserError(f"the tokenizer {label} is missing")
        try:
            self._tokens = files[tokens_name].decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{label} is damaged: {error}") from error
        self._ids = {token: id for id, token in enumerate(self._tokens)}
        self.vocab_size = len(self._tokens)
        self._is_opennmt = OPENNMT_FILE in files
        pad, first = "<pad>", "</s>"  # fairseq starts decoding from the end token.
        if self._is_opennmt:
            pad, first = "<blank>", files[OPENNMT_FILE].decode(errors="replace")
        special = ("<s>", pad, "</s>", "<unk>", first)
        if missing := [token for token in special if token not in self._ids]:
            raise UserError(f"{label} has no {missing[0]}")
        # A later entry of one name has the text of the token, the first one its meaning.
        start, self.pad_id, self.eos_id, self.unk_id, self.bos_id = map(self._tokens.index, special)
        self._unseen = {start, self.pad_id}
        self._processor = None
        self._segmented: Callable[[str], str] = lambda text: text
        if pieces_name in files:
            self._processor = open_model(files[pieces_name], str(Path(folder, pieces_name)))
            self._sampler = TextSampler(self._processor)
        elif codes_name in files:
            self._segmented = _subword_nmt(files[codes_name], str(Path(folder, codes_name)))
        digest = hashlib.sha256()
        for name in [*names, OPENNMT_FILE] if self._is_opennmt else names:
            content = files.get(name, b"")
            digest.update(f"{len(content)}\n".encode() + content)
        self.fingerprint = digest.hexdigest()

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encoded(tokens) for tokens in self._split(texts)]

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        return [self._with_spaces(tokens) for tokens in self._split(texts)]

    def sample(self, texts: Sequence[str], seed: int, amount: float) -> list[list[int]]:
        if self._processor is None:
            raise UserError(
                f"data.subword_sampling={amount} needs a vocabulary with a SentencePiece model: "
                "set it to 0"
            )
        drawn = self._sampler.sample_pieces(list(texts), seed, amount)
        return [self._encoded(self._tokens_of(" ".join(pieces))) for pieces in drawn]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return [self._decoded(self.until_end(tokens)) for tokens in sentences]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._with_spaces(self._names(tokens))

    def with_source_end(self, tokens: Sequence[int]) -> list[int]:
        # In OpenNMT-py, which leaves out empty sources, only targets have an end token.
        return list(tokens) if self._is_opennmt and tokens else super().with_source_end(tokens)

    def _split(self, texts: Sequence[str]) -> list[list[str]]:
        if self._processor is not None:
            split = self._processor.encode(list(texts), out_type=str)
            return [self._tokens_of(" ".join(pieces)) for pieces in split]
        return [self._tokens_of(self._segmented(text.strip())) for text in texts]

    def _tokens_of(self, text: str) -> list[str]:
        # OpenNMT-py splits at single spaces only: what is between two is an unknown token.
        return text.split(" " if self._is_opennmt else None) if text else []

    def _encoded(self, tokens: Sequence[str]) -> list[int]:
        return [self._ids.get(token, self.unk_id) for token in tokens]

    def _names(self, tokens: Sequence[int]) -> list[str]:
        """Returns the tokens; an id that only the model's embedding table has is unknown."""
        return [self._tokens[token if token < self.vocab_size else self.unk_id] for token in tokens]

    def _with_spaces(self, tokens: Sequence[str]) -> list[str]:
        if self._processor is not None:
            return list(tokens)
        before = ["", *tokens]
        return [
            token if previous.endswith(_CONTINUES) else SPACE + token
            for previous, token in zip(before, tokens, strict=False)
        ]

    def _decoded(self, tokens: Sequence[int]) -> str:
        names = self._names([token for token in tokens if token not in self._unseen])
        text = " ".join(names)
        if self._processor is not None:
            if self._is_opennmt:
                return str(self._processor.decode_pieces(names))
            return text.replace(" ", "").replace(SPACE, " ").strip()
        if CODES_FILE.format(side="target") in self.files:
            return f"{text} ".replace(f"{_CONTINUES} ", "").rstrip()
        return text


def read_fairseq(content: str, label: str) -> list[str]:
    """Returns the tokens of a `dict.txt` in the order of their ids, with the special tokens.

    Raises:
      UserError: a line is not a token with its count, or a token occurs twice.
    """
    tokens = ["<s>", "<pad>", "</s>", "<unk>"]
    known = set(tokens)
    lines = re.split("\r\n|\n|\r", content)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        token, _, count = line.rstrip().rpartition(" ")
        replaces = count == "#fairseq:overwrite"
        if replaces:
            token, _, count = token.rpartition(" ")
        if not re.fullmatch("[+-]?[0-9]+", count):
            raise UserError(f"{label}, line {number}: not a token and its count: {line!r}")
        if token in known and not replaces:
            raise UserError(
                f"{label}, line {number}: {token!r} occurs twice; end the line with "
                "#fairseq:overwrite if it replaces a special token"
            )
        tokens.append(token)
        known.add(token)
    return tokens


def _subword_nmt(codes: bytes, label: str) -> Callable[[str], str]:
    with requiring(label, "subword-nmt"):
        from subword_nmt.apply_bpe import BPE
    try:
        segment: Callable[[str], str] = BPE(io.StringIO(codes.decode())).segment
    # The library prints the line, and exits.
    except (SystemExit, ValueError) as error:
        raise UserError(f"{label} does not have BPE codes of subword-nmt") from error
    return segment
