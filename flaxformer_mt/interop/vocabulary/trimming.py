"""Vocabularies reduced to the tokens that a text needs.

The text has the same tokens as before. Special tokens, languages and other tokens that are never
split are kept, and so are the bytes and the single characters of the text, of which any other text
in its script can be made. Of BPE, whose pieces are made by merging smaller ones, the smaller ones
are kept.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flaxformer_mt.data.tokenizers.hub_tokenizer import EARLIER, HubTokenizer
from flaxformer_mt.data.tokenizers.hub_tokenizer import VOCABULARY_FILE as TOKENIZER_JSON
from flaxformer_mt.data.tokenizers.m2m100_tokenizer import PIECES_FILE, M2M100Tokenizer
from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    read_object,
)
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, parse_model
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.vocabulary import tokenizer_json
from flaxformer_mt.interop.vocabulary.changes import VocabularyChange

_ADDED_TOKENS = "added_tokens.json"


def trimmed(tokenizers: Tokenizers, texts: Sequence[str]) -> VocabularyChange:
    """Returns the vocabularies with the tokens that texts need, in the order of before.

    Args:
      tokenizers: the vocabularies.
      texts: sentences of any side, possibly with the language that they begin with.

    Raises:
      UserError: the vocabulary is not a SentencePiece model of ours, and not one of the Hub's.
    """
    source, target = tokenizers.source, tokenizers.target
    if isinstance(source, SentencePieceTokenizer):
        kept = _kept_pieces(source, texts)
        new_source = SentencePieceTokenizer(_reduced_model(source.model, kept))
        if tokenizers.joint:
            return _checked(tokenizers, Tokenizers(new_source, new_source), kept, kept)
        assert isinstance(target, SentencePieceTokenizer)
        kept_target = _kept_pieces(target, texts)
        new_target = SentencePieceTokenizer(_reduced_model(target.model, kept_target))
        return _checked(tokenizers, Tokenizers(new_source, new_target), kept, kept_target)
    if isinstance(source, HubTokenizer):
        kept, files = _of_tokenizer_json(source, texts)
    elif isinstance(source, MarianTokenizer) and isinstance(target, MarianTokenizer):
        kept, files = _of_marian(source, target, texts)
    else:
        raise UserError(f"the vocabulary is a {type(source).__name__}, which cannot be trimmed")
    new = Tokenizers(type(source)(files, "source"), type(source)(files, "target"))
    return _checked(tokenizers, new, kept, kept)


def _checked(
    before: Tokenizers, after: Tokenizers, source: Sequence[int], target: Sequence[int]
) -> VocabularyChange:
    for side, kept in (("source", source), ("target", target)):
        old, new = getattr(before, side), getattr(after, side)
        if new.entries(range(new.vocab_size)) != old.entries(kept):
            raise UserError(f"the ids of its {side} vocabulary have gaps: it cannot be trimmed")
    rows = [[(token,) for token in kept] for kept in (source, target)]
    return VocabularyChange(after, rows[0], rows[1], drops_spare_rows=True)


def _is_needed(used: Collection[str], is_bpe: bool) -> Callable[[str], bool]:
    """Returns whether a piece is one of `used`, a character of them, or a part of one in BPE."""
    parts = {SPACE, *used, *itertools.chain.from_iterable(used)}
    if is_bpe:
        for piece in used:
            spans = itertools.combinations(range(len(piece) + 1), 2)
            parts.update(piece[start:end] for start, end in spans)
    return parts.__contains__


def _kept_pieces(side: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Returns the ids of a SentencePiece model that texts need."""
    assert side.model is not None
    return _kept_of_model(parse_model(side.model), set(itertools.chain(*side.split(texts))))


def _kept_of_model(proto: Any, used: Collection[str]) -> list[int]:
    known = {piece.piece for piece in proto.pieces}.intersection(used)  # Unknown ones may be long.
    is_needed = _is_needed(known, proto.trainer_spec.model_type == proto.trainer_spec.BPE)
    return [
        id
        for id, piece in enumerate(proto.pieces)
        if piece.type not in (piece.NORMAL, piece.UNUSED) or is_needed(piece.piece)
    ]


def _reduced_model(model: bytes, kept: Sequence[int]) -> bytes:
    proto = parse_model(model)
    pieces = [proto.pieces[id] for id in kept]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.vocab_size = len(pieces)
    proto.DiscardUnknownFields()  # Such as segmentations by the whole vocabulary, for self-tests.
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _of_tokenizer_json(
    side: HubTokenizer, texts: Sequence[str]
) -> tuple[list[int], dict[str, bytes]]:
    content = json.loads(side.files[TOKENIZER_JSON])
    ids = set(itertools.chain(*side.encode_parts(texts)))
    always = {side.pad_id, side.eos_id, side.unk_id, *tokenizer_json.added_ids(content)}
    is_needed = _is_needed(side.entries([*ids]), tokenizer_json.is_bpe(content))
    is_byte = re.compile("." if side.is_byte_level else "<0x[0-9A-F]{2}>")
    entries = side.entries(range(side.vocab_size))
    kept = [
        id
        for id, entry in enumerate(entries)
        if id in always or is_needed(entry) or is_byte.fullmatch(entry)
    ]
    # They hold the whole vocabulary, and transformers reads the first file instead.
    earlier = set(itertools.chain(*EARLIER))
    files = {name: file for name, file in side.files.items() if name not in earlier}
    files[TOKENIZER_JSON] = tokenizer_json.written(tokenizer_json.reduced(content, kept))
    return kept, _with_added_ids(files, kept)


def _of_marian(
    source: MarianTokenizer, target: MarianTokenizer, texts: Sequence[str]
) -> tuple[list[int], dict[str, bytes]]:
    """Reduces a vocabulary of pieces in `vocab.json`, by SentencePiece models of the sides."""
    files = dict(source.files)
    if read_object(files, TOKENIZER_CONFIG, "").get("separate_vocabs"):
        raise UserError("its sides have separate vocabularies, whose special tokens share ids")
    is_m2m100 = isinstance(source, M2M100Tokenizer)
    names = (PIECES_FILE,) if is_m2m100 else ("source.spm", "target.spm")
    removed, remaining = set(), set()
    for name, side in zip(names, (source, target), strict=False):
        proto = parse_model(files[name])
        pieces = [piece.piece for piece in proto.pieces]
        kept = _kept_of_model(proto, set(itertools.chain(*side.split(texts))))
        files[name] = _reduced_model(files[name], kept)
        remaining |= {pieces[id] for id in kept}
        removed |= set(pieces)
    vocabulary = read_object(files, VOCABULARY_FILE, "")
    kept_names = sorted(
        (name for name in vocabulary if name in remaining or name not in removed),
        key=vocabulary.__getitem__,
    )
    files[VOCABULARY_FILE] = tokenizer_json.written(
        {name: id for id, name in enumerate(kept_names)}
    )
    kept = [vocabulary[name] for name in kept_names]
    # Languages of M2M-100, and tokens that were added, follow.
    kept += range(len(vocabulary), source.vocab_size)
    return kept, _with_added_ids(files, kept)


def _with_added_ids(files: dict[str, bytes], kept: Sequence[int]) -> dict[str, bytes]:
    """Returns tokenizer files with the new ids of tokens that were added to a vocabulary."""
    ids = {old: new for new, old in enumerate(kept)}
    if TOKENIZER_CONFIG in files:
        settings = read_object(files, TOKENIZER_CONFIG, "")
        decoder = settings.get("added_tokens_decoder", {})
        if decoder:
            settings["added_tokens_decoder"] = {str(ids[int(id)]): decoder[id] for id in decoder}
            files[TOKENIZER_CONFIG] = tokenizer_json.written(settings)
    if _ADDED_TOKENS in files:
        added = read_object(files, _ADDED_TOKENS, "")
        files[_ADDED_TOKENS] = tokenizer_json.written({name: ids[added[name]] for name in added})
    return files
