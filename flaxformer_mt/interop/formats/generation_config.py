"""Converts the configuration of Hugging Face's `generate` to our search options, and back.

Its lengths include the start token. Its bad words are token ids; in published models they include
padding, which our search never chooses.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.config.fields import MAX_VOCABULARY, type_hints
from flaxformer_mt.config.relations import SAMPLING_FIELDS
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError
from flaxformer_mt.input_files import Count
from flaxformer_mt.interop.formats.bundle import unsupported_options
from flaxformer_mt.interop.weight_maps.family import check_kinds

_EARLY_STOPPING: dict[Any, Literal["never", "heuristic", "first"]] = {
    "never": "never",
    False: "heuristic",
    True: "first",
}

# Settings of `generate` with their defaults, ...
_DEFAULTS: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False,
    "min_length": 0, "max_length": 0, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0,
    "renormalize_logits": False, "forced_eos_token_id": None, "bad_words_ids": [],
    "suppress_tokens": [],
    "num_beam_groups": 1, "diversity_penalty": 0.0, "do_sample": False, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0,
    "min_new_tokens": None, "max_new_tokens": None,
}  # fmt: skip
_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_VOCABULARY)]]
KINDS: dict[str, Any] = {
    "early_stopping": bool | Literal["never"],
    **dict.fromkeys(("min_length", "max_length", "min_new_tokens", "max_new_tokens"), Count),
    "bad_words_ids": list[_Ids],
    "suppress_tokens": _Ids,
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), int | list[int]),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), int),
    "forced_bos_token_id": int | list[int],
}
# ... those with a counterpart of the same meaning, ...
_SAME = {
    "num_beams": "beam_size",
    "num_return_sequences": "n_best",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "renormalize_logits": "renormalize",
    "num_beam_groups": "beam_groups",
    "diversity_penalty": "diversity_penalty",
    "do_sample": "sampling",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "epsilon_cutoff": "epsilon_cutoff",
}
# ... and unsupported ones that affect results, with the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "eta_cutoff": (0.0,), "top_h": (), "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,), "forced_bos_token_id": (),
    "begin_suppress_tokens": ([],), "exponential_decay_length_penalty": (), "sequence_bias": (),
    "guidance_scale": (1.0,), "watermarking_config": (), "penalty_alpha": (0.0,),
    "forced_decoder_ids": (), "constraints": (), "force_words_ids": (), "stop_strings": (),
    "max_time": (),
}  # fmt: skip

_SHORTEST_SPLIT = DecodeConfig().longest_source

KINDS |= {theirs: type_hints(DecodeConfig)[ours] for theirs, ours in _SAME.items()}
_FIRST = "forced_bos_token_id"

FIELDS = frozenset({*_DEFAULTS, *_UNSUPPORTED})
"""The names of all settings of `generate`, in whichever file they are stored."""


def to_decode(
    settings: Mapping[str, Any], model: TransformerConfig, target: Tokenizer | None = None
) -> tuple[DecodeConfig, list[str]]:
    """Converts the content of `generation_config.json`, or of an older `config.json`.

    A `max_length` equal to the size of the model's position table only serves to stop endless
    translations. It is replaced by a limit relative to the source's length, more generous than our
    default, which ends repetitions sooner.

    Returns:
      The search options, and a line about each unsupported setting.

    Raises:
      UserError: a value is invalid.
    """
    settings = with_single_tokens(settings)
    check_kinds(settings, KINDS, "its generation settings are")
    given = {name: value for name, value in settings.items() if value is not None}
    values = _DEFAULTS | given
    first = _first_token(given.get(_FIRST), target)
    fields: dict[str, Any] = {ours: values[theirs] for theirs, ours in _SAME.items()}
    fields |= {
        "length_penalty_kind": "average",
        "early_stopping": _EARLY_STOPPING[values["early_stopping"]],
        "force_end": _forces_end(values["forced_eos_token_id"], model),
        "bad_word_ids": _bad_word_ids(values, model),
        "first_token": first,
        **_lengths(values, model),
        "max_source_length": model.max_length if model.max_length > _SHORTEST_SPLIT else 0,
    }
    if not values["do_sample"]:  # `generate` ignores these, too.
        fields |= {name: getattr(DecodeConfig, name) for name in SAMPLING_FIELDS}
    decode = DecodeConfig(**fields)
    notes = [
        f"{name}={given[name]} is not supported, and ignored"
        for name, neutral in _UNSUPPORTED.items()
        if name in given and given[name] not in neutral and not (name == _FIRST and first)
    ]
    if decode.sampling and decode.beam_size > 1:
        notes.append(
            f"num_beams={decode.beam_size} is not supported with do_sample, and ignored: samples "
            "are drawn independently"
        )
    if isinstance(given.get("eos_token_id"), list) and len(set(given["eos_token_id"])) > 1:
        notes.append(
            f"eos_token_id={given['eos_token_id']} has several end tokens: only {model.eos_id}, "
            "that of the vocabulary, ends a translation"
        )
    return decode, notes


def with_single_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings in which each list of one special token is replaced by the token."""
    return {
        name: value[0]
        if name.endswith("_token_id") and isinstance(value, list) and len(value) == 1
        else value
        for name, value in settings.items()
    }


def from_decode(
    decode: DecodeConfig,
    model: TransformerConfig,
    kept: Mapping[str, Any],
    target: Tokenizer | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Converts search options to settings of `generate`.

    Settings that came with the model, `kept`, remain unchanged where they are equivalent.

    Returns:
      The settings, and a line about each option without a counterpart.
    """
    ids: dict[str, Any] = {
        "decoder_start_token_id": model.bos_id,
        "eos_token_id": model.eos_id,
        "pad_token_id": model.pad_id,
    }
    values = {theirs: getattr(decode, ours) for theirs, ours in _SAME.items()}
    to_theirs = {ours: theirs for theirs, ours in _EARLY_STOPPING.items()}
    values |= {
        "early_stopping": to_theirs[decode.early_stopping],
        "forced_eos_token_id": model.eos_id if decode.force_end else None,
        "max_length": decode.max_length + 1 if decode.max_length else model.max_length,
        "min_length": decode.min_length + 1 if decode.min_length else 0,
        "bad_words_ids": [
            *([token] for token in forbidden_token_ids(model, decode)),
            *([int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids),
        ],
    }
    if decode.sampling:
        values["num_beams"] = 1  # More are beam search with sampling in `generate`.
    else:
        values["top_k"] = _DEFAULTS["top_k"]
    if decode.first_token and target is not None:
        values[_FIRST] = target.encode_parts([decode.first_token])[0][0]
    try:
        unchanged = bool(kept) and to_decode(kept, model, target)[0] == decode
    except UserError:
        unchanged = False
    if unchanged:
        changed = {}
    else:
        changed = {
            name: value
            for name, value in values.items()
            if value != kept.get(name, _DEFAULTS.get(name))
        }
        # Where they are given, `generate` ignores the lengths with the start token.
        replaced = {"max_new_tokens", "min_new_tokens"}
        if not decode.first_token and target is not None and _first_token(kept.get(_FIRST), target):
            replaced.add(_FIRST)
        kept = {name: value for name, value in kept.items() if name not in replaced}
    if is_one_of(model.eos_id, kept.get("eos_token_id")):
        del ids["eos_token_id"]
    # `generate` starts from it where no start token is set.
    if kept.get("decoder_start_token_id", kept.get("bos_token_id")) == model.bos_id:
        del ids["decoder_start_token_id"]
    return ids | dict(kept) | ids | changed, _losses(decode)


def is_one_of(eos_id: int, given: Any) -> bool:
    """Returns whether `given`, a value of `eos_token_id`, is a list with this end token."""
    return isinstance(given, list) and eos_id in given


def _losses(decode: DecodeConfig) -> list[str]:
    # Limits relative to the source's length become `max_length`.
    supported = {
        *_SAME.values(), "length_penalty_kind", "early_stopping", "force_end", "bad_word_ids",
        "max_length", "min_length", "max_length_factor", "max_length_extra", "first_token",
        "allow_padding",
    }  # fmt: skip
    notes = unsupported_options(decode, supported, "generate")
    if decode.length_penalty_kind != "average" and decode.length_penalty and decode.beam_size > 1:
        notes.append(
            "decode.length_penalty_kind=gnmt is not supported by generate, which divides scores by "
            f"length**{decode.length_penalty} instead: adjust length_penalty in "
            "generation_config.json if needed"
        )
    return notes


def _first_token(given: Any, target: Tokenizer | None) -> str:
    if target is None or not isinstance(given, int) or given < 0:
        return ""
    (name,) = target.pieces([given])
    return name if target.encode_parts([name]) == [[given]] else ""


def excluded_phrases(values: Mapping[str, Any]) -> list[Sequence[int]]:
    """Returns the token sequences that the settings of `generate` exclude."""
    return [
        *(values.get("bad_words_ids") or []),
        *([token] for token in values.get("suppress_tokens") or []),
    ]


def _bad_word_ids(values: Mapping[str, Any], model: TransformerConfig) -> tuple[str, ...]:
    """Returns the excluded phrases, except single tokens that our search never chooses."""
    phrases = excluded_phrases(values)
    never = [[token] for token in forbidden_token_ids(model, DecodeConfig())]
    size = model.target_vocab_size or MAX_VOCABULARY
    for token in itertools.chain(*phrases):
        if token >= size:
            raise UserError(
                f"bad_words_ids has {token!r}, which is outside the vocabulary (0 to {size - 1})"
            )
    return tuple(",".join(map(str, ids)) for ids in phrases if list(ids) not in never)


def _forces_end(given: Any, model: TransformerConfig) -> bool:
    if given not in (None, model.eos_id) and not is_one_of(model.eos_id, given):
        raise UserError(f"forced_eos_token_id={given!r} is not the end token {model.eos_id}")
    return given is not None


def _lengths(values: Mapping[str, Any], model: TransformerConfig) -> dict[str, Any]:
    # max_length and min_length count the start token, max_new_tokens and min_new_tokens do not.
    longest = values["max_new_tokens"] or max(values["max_length"] - 1, 0)
    shortest = values["min_new_tokens"] or max(values["min_length"] - 1, 0)
    table = None if model.position_kind == "t5_relative" else model.max_length
    if longest and table not in (longest, longest + 1):
        # `generate` ends at max_length regardless of min_length; ours leaves room for the end.
        return {"min_length": min(shortest, longest - 1), "max_length": longest}
    return {"min_length": shortest, "max_length_factor": 2.0, "max_length_extra": 50}
