"""Vocabularies reduced to the tokens that a text needs, or with further tokens and languages.

`trimmed`: the text has the same tokens as before. Special tokens, languages and other tokens that
are never split are kept, and so are the bytes and the single characters of the text, of which any
other text in its script can be made. BPE merges smaller pieces into larger ones: the smaller ones
are kept, too.

`extended`: the ids of before stay. A new token is never split. Its row is the mean of those of the
tokens that it consisted of (fast vocabulary transfer, Gee et al. 2022); that of a new language is a
copy of a related one's.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

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
from flaxformer_mt.interop.vocabulary.changes import VocabularyChange


class _Model(TypedDict):
    type: str
    vocab: dict[str, int] | list[Any]


class _TokenizerJson(TypedDict):
    """What is read of `tokenizer.json`; the library checks the rest."""

    model: _Model
    added_tokens: list[dict[str, Any]]


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
    content = read_object(side.files, TOKENIZER_JSON, "", _TokenizerJson)
    ids = set(itertools.chain(*side.encode_parts(texts)))
    added = [token["id"] for token in content["added_tokens"]]
    always = {side.pad_id, side.eos_id, side.unk_id, *added}
    is_needed = _is_needed(side.entries([*ids]), content["model"]["type"] == "BPE")
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
    files[TOKENIZER_JSON] = to_json(_reduced_json(content, kept))
    return kept, _with_added_ids(files, kept)


def _reduced_json(content: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Returns a vocabulary of the kept tokens, whose new ids are their positions in `kept`."""
    ids = {old: new for new, old in enumerate(kept)}
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with their log-probabilities.
        pieces: Any = [entry for id, entry in enumerate(vocabulary) if id in ids]
        changes: dict[str, Any] = {"unk_id": ids.get(model["unk_id"])}
    else:
        pieces = {piece: ids[id] for piece, id in vocabulary.items() if id in ids}
        changes = {}
    if model["type"] == "BPE":
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise UserError("its BPE marks parts of words by a prefix or suffix: not supported")
        changes["merges"] = [merge for merge in model["merges"] if _is_within(merge, pieces)]
    return content | {
        "model": model | {"vocab": pieces} | changes,
        "added_tokens": [
            token | {"id": ids[token["id"]]}
            for token in content["added_tokens"]
            if token["id"] in ids
        ],
        "post_processor": _with_ids(content.get("post_processor"), ids),
        "padding": None,
        "truncation": None,
    }


def _is_within(merge: str | Sequence[str], pieces: Mapping[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in pieces and right in pieces and left + right in pieces


def _with_ids(processor: Any, ids: Mapping[int, int]) -> Any:
    """Returns a post-processor with other ids of the tokens that it adds."""
    if processor is None:
        return None
    changed = dict(processor)
    if "processors" in processor:
        changed["processors"] = [_with_ids(each, ids) for each in processor["processors"]]
    if "special_tokens" in processor:
        changed["special_tokens"] = {
            name: token | {"ids": [ids[id] for id in token["ids"]]}
            for name, token in processor["special_tokens"].items()
        }
    for name in {"sep", "cls"} & processor.keys():
        changed[name] = [processor[name][0], ids[processor[name][1]]]
    return changed


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


def extended(
    tokenizers: Tokenizers, tokens: Sequence[str], languages: Mapping[str, str]
) -> VocabularyChange:
    """Returns the vocabularies with further tokens.

    Args:
      tokenizers: the vocabularies.
      tokens: texts that become one token each, on both sides.
      languages: for each new language the one whose row it begins with, as texts begin with them:
        `{"tyv_Cyrl": "kaz_Cyrl"}`; in vocabularies learned here, tags of sources ("<2ty>").

    Raises:
      UserError: a token or language is in the vocabulary already, the related language is not, or
        the vocabulary cannot be extended.
    """
    given = [*tokens, *languages]
    for name in given:
        if not name.strip() or name != name.strip() or given.count(name) > 1:
            raise UserError(f"{name!r} cannot be added: give each token once, without spaces")
    source = tokenizers.source
    if isinstance(source, SentencePieceTokenizer):
        sides = [
            SentencePieceTokenizer(_extended_model(side.model, tokens, languages if reads else {}))
            for side, reads in ((source, True), (tokenizers.target, tokenizers.joint))
            if side.model is not None
        ]
        new = Tokenizers(sides[0], sides[0] if tokenizers.joint else sides[1])
        of_target = languages if tokenizers.joint else {}
    elif isinstance(source, HubTokenizer | MarianTokenizer):
        files = _extended_files(source, tokens, languages)
        new = Tokenizers(type(source)(files, "source"), type(source)(files, "target"))
        of_target = languages
    else:
        raise UserError(f"the vocabulary is a {type(source).__name__}, which cannot be extended")
    is_fixed = isinstance(source, M2M100Tokenizer) or _class_of(source) == "MBart50Tokenizer"
    note = (
        f"in transformers, {_class_of(source)} has a list of its languages: src_lang and tgt_lang "
        f"cannot name {', '.join(languages)} there"
    )
    return VocabularyChange(
        new,
        _rows_of_extension(source, new.source, tokens, languages),
        _rows_of_extension(tokenizers.target, new.target, tokens, of_target),
        drops_spare_rows=False,
        notes=(note,) if languages and is_fixed else (),
    )


def _class_of(side: Tokenizer) -> str:
    given = read_object(side.files, TOKENIZER_CONFIG, "").get("tokenizer_class")
    return str(given or type(side).__name__).removesuffix("Fast")


def _rows_of_extension(
    before: Tokenizer, after: Tokenizer, tokens: Sequence[str], languages: Mapping[str, str]
) -> list[tuple[int, ...]]:
    names = (*tokens, *languages)
    made_of = [tuple(ids) for ids in before.encode_parts([*tokens, *languages.values()])]
    for language, like in languages.items():
        if len(made_of[names.index(language)]) != 1:
            raise UserError(f"{like} is not a language of its vocabulary")
    for number, (name, ids) in enumerate(zip(names, before.encode_parts(names), strict=True)):
        if len(ids) == 1 and ids != [before.unk_id]:
            raise UserError(f"{name} is already a token of its vocabulary")
        if after.encode_parts([name]) != [[before.vocab_size + number]]:
            raise UserError(f"{name} cannot be added: the vocabulary's rules change or split it")
    old = [(token,) for token in range(before.vocab_size)]
    # A SentencePiece model has each token once more, for places inside of words.
    inside = made_of[: after.vocab_size - len(old) - len(names)]
    return [*old, *made_of, *inside]


def _extended_model(model: bytes, tokens: Sequence[str], languages: Mapping[str, str]) -> bytes:
    proto = parse_model(model)
    # As in vocabularies that are learned here: with the preceding space, tokens without it as well.
    for piece in (*(SPACE + name for name in (*tokens, *languages)), *tokens):
        proto.pieces.add(piece=piece, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _extended_files(
    side: HubTokenizer | MarianTokenizer, tokens: Sequence[str], languages: Mapping[str, str]
) -> dict[str, bytes]:
    files = dict(side.files)
    settings = read_object(files, TOKENIZER_CONFIG, "")
    first = side.vocab_size
    ids = {name: first + number for number, name in enumerate((*tokens, *languages))}
    added = dict(ids)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entries = {name: {"content": name, **flags, "special": name in languages} for name in ids}
    if isinstance(side, HubTokenizer):
        content = read_object(files, TOKENIZER_JSON, "", _TokenizerJson)
        content["added_tokens"] += [entries[name] | {"id": id} for name, id in ids.items()]
        files[TOKENIZER_JSON] = to_json(content)
        for name in ("extra_special_tokens", "additional_special_tokens"):
            if isinstance(settings.get(name), list):
                settings[name] = [*settings[name], *languages]
    elif not isinstance(side, M2M100Tokenizer):  # Codes of OPUS-MT's languages are pieces.
        added = {name: ids[name] for name in tokens}
        vocabulary = read_object(files, VOCABULARY_FILE, "")
        vocabulary |= {name: ids[name] for name in languages}
        files[VOCABULARY_FILE] = to_json(vocabulary)
    if "added_tokens_decoder" in settings:
        decoder = {str(id): entries[name] for name, id in added.items()}
        settings["added_tokens_decoder"] |= decoder
    elif added and not isinstance(side, HubTokenizer):
        known = read_object(files, ADDED_TOKENS, "") | added
        files[ADDED_TOKENS] = to_json(known)
    files[TOKENIZER_CONFIG] = to_json(settings)
    return files
