"""Vocabularies reduced to the tokens that a text needs.

The text has the same tokens as before. Special tokens, languages and other tokens that are never
split are kept, and so are the bytes and the single characters of the text, of which any other text
in its script can be made. Of BPE, whose pieces are made by merging smaller ones, the smaller ones
are kept.
"""

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flaxformer_mt.data.tokenizers.hub_tokenizer import EARLIER, HubTokenizer
from flaxformer_mt.data.tokenizers.hub_tokenizer import VOCABULARY_FILE as TOKENIZER_JSON
from flaxformer_mt.data.tokenizers.m2m100_tokenizer import PIECES_FILE, M2M100Tokenizer
from flaxformer_mt.data.tokenizers.marian_tokenizer import (
    ADDED_TOKENS,
    TOKENIZER_CONFIG,
    VOCABULARY_FILE,
    MarianTokenizer,
    read_object,
)
from flaxformer_mt.data.tokenizers.sentencepiece_model import SPACE, parse_model
from flaxformer_mt.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer, Tokenizers
from flaxformer_mt.errors import UserError
from flaxformer_mt.interop.formats.huggingface import to_json
from flaxformer_mt.interop.vocabulary import tokenizer_json
from flaxformer_mt.interop.vocabulary.changes import VocabularyChange


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
        sides = [source] if tokenizers.joint else [source, target]
        reduced = [_reduced_side(side, texts) for side in sides]
        (kept, new_source), (kept_target, new_target) = reduced[0], reduced[-1]
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


def _reduced_side(
    side: Tokenizer, texts: Sequence[str]
) -> tuple[list[int], SentencePieceTokenizer]:
    assert side.model is not None
    kept, model = _reduced_model(parse_model(side.model), side, texts)
    return kept, SentencePieceTokenizer(model)


def _reduced_model(proto: Any, side: Tokenizer, texts: Sequence[str]) -> tuple[list[int], bytes]:
    """Reduces the SentencePiece model of a side in place; returns what is kept, and its bytes."""
    used = set(itertools.chain(*side.split(texts)))
    known = {piece.piece for piece in proto.pieces} & used  # Unknown ones may be long.
    is_needed = _is_needed(known, proto.trainer_spec.model_type == proto.trainer_spec.BPE)
    kept = [
        id
        for id, piece in enumerate(proto.pieces)
        if piece.type not in (piece.NORMAL, piece.UNUSED) or is_needed(piece.piece)
    ]
    pieces = [proto.pieces[id] for id in kept]
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.vocab_size = len(pieces)
    proto.DiscardUnknownFields()  # Such as segmentations by the whole vocabulary, for self-tests.
    return kept, proto.SerializeToString(deterministic=True)


def _of_tokenizer_json(
    side: HubTokenizer, texts: Sequence[str]
) -> tuple[list[int], dict[str, bytes]]:
    content = read_object(side.files, TOKENIZER_JSON, "", tokenizer_json.Schema)
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
    files[TOKENIZER_JSON] = to_json(tokenizer_json.reduced(content, kept))
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
        kept, files[name] = _reduced_model(proto, side, texts)
        remaining |= {pieces[id] for id in kept}
        removed |= set(pieces)
    vocabulary = read_object(files, VOCABULARY_FILE, "")
    kept_names = sorted(
        (name for name in vocabulary if name in remaining or name not in removed),
        key=vocabulary.__getitem__,
    )
    files[VOCABULARY_FILE] = to_json({name: id for id, name in enumerate(kept_names)})
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
            files[TOKENIZER_CONFIG] = to_json(settings)
    if ADDED_TOKENS in files:
        added = read_object(files, ADDED_TOKENS, "")
        files[ADDED_TOKENS] = to_json({name: ids[added[name]] for name in added})
    return files
