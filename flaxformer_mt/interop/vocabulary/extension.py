"""Vocabularies with further tokens and languages; the ids of before stay.

A new token is never split. Its row is the mean of those of the tokens that it consisted of (fast
vocabulary transfer, Gee et al. 2022); that of a new language is a copy of a related one's.
"""

from collections.abc import Mapping, Sequence

from flaxformer_mt.data.tokenizers.hub_tokenizer import VOCABULARY_FILE as TOKENIZER_JSON
from flaxformer_mt.data.tokenizers.hub_tokenizer import HubTokenizer
from flaxformer_mt.data.tokenizers.m2m100_tokenizer import M2M100Tokenizer
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
        _rows(source, new.source, tokens, languages),
        _rows(tokenizers.target, new.target, tokens, of_target),
        drops_spare_rows=False,
        notes=(note,) if languages and is_fixed else (),
    )


def _class_of(side: Tokenizer) -> str:
    given = read_object(side.files, TOKENIZER_CONFIG, "").get("tokenizer_class")
    return str(given or type(side).__name__).removesuffix("Fast")


def _rows(
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
    if isinstance(side, HubTokenizer):
        content = read_object(files, TOKENIZER_JSON, "", tokenizer_json.Schema)
        content["added_tokens"] += [
            tokenizer_json.added_token(name, name in languages) | {"id": id}
            for name, id in ids.items()
        ]
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
        settings["added_tokens_decoder"] |= {
            str(id): tokenizer_json.added_token(name, name in languages)
            for name, id in added.items()
        }
    elif added and not isinstance(side, HubTokenizer):
        known = read_object(files, ADDED_TOKENS, "") | added
        files[ADDED_TOKENS] = to_json(known)
    files[TOKENIZER_CONFIG] = to_json(settings)
    return files
