"""Changes of `tokenizer.json`, the vocabulary format of the library `tokenizers`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from flaxformer_mt.errors import UserError

Content = dict[str, Any]


class _Model(TypedDict):
    type: str
    vocab: dict[str, int] | list[Any]


class Schema(TypedDict):
    """What is read of `tokenizer.json`; the library checks the rest."""

    model: _Model
    added_tokens: list[dict[str, Any]]


def is_bpe(content: Content) -> bool:
    """Whether pieces are made of smaller ones, which must be in the vocabulary as well."""
    return bool(content["model"]["type"] == "BPE")


def added_ids(content: Content) -> list[int]:
    """Returns the ids of special tokens, languages, and other tokens that are never split."""
    return [token["id"] for token in content["added_tokens"]]


def reduced(content: Content, kept: Sequence[int]) -> Content:
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
    if is_bpe(content):
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


def added_token(name: str, is_special: bool) -> dict[str, Any]:
    """Returns the entry of a token that is never split."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": name, **flags, "special": is_special}
