"""A changed vocabulary, and the model that has it.

Each row of a table (embeddings, or columns and bias of the output) is the mean of rows of before:
of one, which it equals to the bit, or of those that a new token is made of.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_mt.data.tokenizers.tokenizer import Tokenizers
from flaxformer_mt.input_files import parse_json
from flaxformer_mt.interop.certificate import values_of_modules
from flaxformer_mt.interop.formats.bundle import ModelBundle, Notes
from flaxformer_mt.interop.formats.huggingface import CONFIG, GENERATION, to_json

Rows = Sequence[Sequence[int]]
"""For each token, the tokens of before whose rows its own is the mean of."""

# The parameters with an axis of the size of a vocabulary, and that axis.
_SOURCE = {"source_embedding/embedding": 0}
_TARGET = {"target_embedding/embedding": 0, "output/kernel": 1, "output/bias": 0}
_ID_LISTS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")


@dataclasses.dataclass(frozen=True)
class VocabularyChange:
    """Vocabularies, and where the rows of their tokens come from."""

    tokenizers: Tokenizers
    source: Rows
    target: Rows
    drops_spare_rows: bool
    """Whether rows of a table that are no token's, which some models have, are removed as well."""
    notes: Notes = ()
    """What other programs cannot do with the vocabularies, in one line each."""


def with_vocabulary(bundle: ModelBundle, change: VocabularyChange) -> tuple[ModelBundle, Notes]:
    """Returns a model with a changed vocabulary, and lines about what it computes.

    Ids in its search options and in the files that came with it are changed, too; a phrase with a
    token that is no longer there is removed, because it cannot be generated.
    """
    model, decode = bundle.config.model, bundle.config.decode
    tables = {
        "source": _all_rows(change.source, model.source_vocab_size, change.drops_spare_rows),
        "target": _all_rows(change.target, model.target_vocab_size, change.drops_spare_rows),
    }
    arrays = flatten_dict(bundle.params, sep="/")
    for rows, axes in ((tables["source"], _SOURCE), (tables["target"], _TARGET)):
        for path, axis in axes.items():
            if path in arrays:
                arrays[path] = _means(np.asarray(arrays[path]), rows, axis)
    new_ids = _new_ids(tables["target"])
    phrases = [[int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids]
    fields: dict[str, Any] = {
        name: new_ids.get(getattr(model, name), getattr(model, name))
        for name in ("pad_id", "bos_id", "eos_id")
    }
    fields |= {f"{side}_vocab_size": len(rows) for side, rows in tables.items()}
    config = dataclasses.replace(
        bundle.config,
        model=dataclasses.replace(model, **fields),
        data=dataclasses.replace(
            bundle.config.data, vocab_size=max(map(len, (change.source, change.target)))
        ),
        decode=dataclasses.replace(
            decode,
            bad_word_ids=tuple(",".join(map(str, ids)) for ids in _mapped(phrases, new_ids)),
        ),
    )
    origin = dict(bundle.origin)
    for name in {CONFIG, GENERATION} & origin.keys():
        origin[name] = to_json(_settings(parse_json(origin[name], name), new_ids))
    changed = ModelBundle(config, unflatten_dict(arrays, sep="/"), change.tokenizers, origin)
    return changed, (*change.notes, _comparison(bundle, changed, tables))


def _all_rows(rows: Rows, size: int, drops_spare: bool) -> Rows:
    spare = () if drops_spare or not size else ((token,) for token in range(len(rows), size))
    return [*rows, *spare] if size else []


def _means(table: np.ndarray, rows: Rows, axis: int) -> np.ndarray:
    """Returns the means of rows; they are computed in float64 where there are several."""
    first = [tokens[0] for tokens in rows]
    result = np.moveaxis(np.take(table, first, axis), axis, 0)
    for token, tokens in enumerate(rows):
        if len(tokens) > 1:
            result[token] = np.take(table, tokens, axis).mean(axis, dtype=np.float64)
    return np.moveaxis(result, 0, axis)


def _new_ids(rows: Rows) -> dict[int, int]:
    """Returns the new id of each token of before that is still there."""
    ids: dict[int, int] = {}
    for token, tokens in enumerate(rows):
        if len(tokens) == 1:
            ids.setdefault(tokens[0], token)  # A later one is a copy.
    return ids


def _settings(values: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Returns the settings of a published model with the new ids of its tokens."""
    changed = dict(values)
    for name, value in values.items():
        if name in _ID_LISTS or (name.endswith("token_id") and isinstance(value, list)):
            changed[name] = _mapped(value or [], new_ids)
        elif name.endswith("token_id"):
            changed[name] = new_ids.get(value)
    return changed


def _mapped(entries: Sequence[Any], new_ids: Mapping[int, int]) -> list[Any]:
    """Returns tokens, or lists of tokens, with their new ids; without those that have none."""
    tokens = [each if isinstance(each, list) else [each] for each in entries]
    new = [[new_ids.get(token) for token in each] for each in tokens]
    return [
        ids if isinstance(entry, list) else ids[0]
        for entry, ids in zip(entries, new, strict=True)
        if None not in ids
    ]


def _comparison(before: ModelBundle, after: ModelBundle, tables: Mapping[str, Rows]) -> str:
    """Tells how the logits of kept tokens compare on random sentences of them."""
    random = np.random.default_rng(0)
    ids = {side: _new_ids(rows) for side, rows in tables.items()}
    pairs = {side: np.array([*each.items()] or [(0, 0)], np.int32) for side, each in ids.items()}
    drawn = {side: random.choice(each, (4, 9)) for side, each in pairs.items()}
    logits = [
        values_of_modules(
            bundle.config.model,
            bundle.params,
            drawn["source"][..., column],
            drawn["target"][..., column],
        )["logits"][..., pairs["target"][:, column]]
        for column, bundle in enumerate((before, after))
    ]
    difference = float(np.abs(logits[0] - logits[1]).max())
    equal = "equal to the bit" if difference == 0 else f"within {difference:.1e}"
    return (
        f"the vocabulary has {after.tokenizers.describe()}; the logits of the "
        f"{len(pairs['target']):,} tokens that it shares with the "
        f"{before.config.model.target_vocab_size:,} of before are {equal} on random sentences"
    )
