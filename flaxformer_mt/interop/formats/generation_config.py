"""How Hugging Face's `generate` is configured, as our search, and back.

Lengths there count the token that starts decoding; bad words are token ids; padding is one of them
in the published models, and is never chosen by our search.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

from flaxformer_mt.config import DecodeConfig, TransformerConfig
from flaxformer_mt.decoding.search.options import forbidden_token_ids
from flaxformer_mt.errors import UserError

_EARLY_STOPPING: dict[Any, Literal["never", "heuristic", "first"]] = {
    "never": "never",
    False: "heuristic",
    True: "first",
}

# Of Hugging Face, with what they are if they are not given, ...
_DEFAULTS: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False,
    "min_length": 0, "max_length": 0, "no_repeat_ngram_size": 0, "repetition_penalty": 1.0,
    "renormalize_logits": False, "forced_eos_token_id": None, "bad_words_ids": [],
    "num_beam_groups": 1, "diversity_penalty": 0.0, "do_sample": False, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0,
    "min_new_tokens": None, "max_new_tokens": None,
}  # fmt: skip
# ... those with the same meaning here, ...
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
# ... and those that change what is found and are not known here, with values that do not.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "eta_cutoff": (0.0,), "top_h": (), "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,), "forced_bos_token_id": (), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "exponential_decay_length_penalty": (), "sequence_bias": (),
    "guidance_scale": (1.0,), "watermarking_config": (), "penalty_alpha": (0.0,),
    "constraints": (), "force_words_ids": (), "stop_strings": (), "max_time": (),
}  # fmt: skip

FIELDS = frozenset({*_DEFAULTS, *_UNKNOWN})
"""What says how `generate` searches, wherever it stands."""


def to_decode(
    settings: Mapping[str, Any], model: TransformerConfig
) -> tuple[DecodeConfig, list[str]]:
    """The search that `generate` would make.

    Where `max_length` is as large as the model's table of positions it only means that no
    translation goes on for ever. Then ours go by the source's length, with more room than by
    default, and a run of repetitions ends sooner.

    Args:
      settings: of `generation_config.json`, or of a `config.json` from before there was one.
      model: which model.

    Returns:
      The options of the search, and a line about each setting that they cannot say.

    Raises:
      UserError: a value is none that `generate` would take.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    values = _DEFAULTS | given
    try:
        fields: dict[str, Any] = {ours: values[theirs] for theirs, ours in _SAME.items()}
        fields |= {
            "length_penalty_kind": "average",
            "early_stopping": _EARLY_STOPPING[values["early_stopping"]],
            "force_end": values["forced_eos_token_id"] is not None,
            "bad_word_ids": _bad_word_ids(values["bad_words_ids"], model),
            **_lengths(values, model),
        }
        if not values["do_sample"]:
            fields["top_k"] = DecodeConfig.top_k  # It has a default there, but no effect.
        decode = DecodeConfig(**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"its generation settings are damaged: {error!r}") from error
    notes = [
        f"{name}={given[name]} is not known here, and left out"
        for name, neutral in _UNKNOWN.items()
        if name in given and given[name] not in neutral
    ]
    return decode, notes


def from_decode(
    decode: DecodeConfig, model: TransformerConfig, kept: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The settings of `generate` for our search.

    Args:
      decode: the options of the search.
      model: which model; has the special tokens.
      kept: settings that came with the model. They stay as they are where they say the same.

    Returns:
      The settings, and a line about each option that they cannot say.
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
            *([token] for token in forbidden_token_ids(model)),
            *([int(token) for token in phrase.split(",")] for phrase in decode.bad_word_ids),
        ],
    }
    if not decode.sampling:
        values["top_k"] = _DEFAULTS["top_k"]
    try:
        unchanged = bool(kept) and to_decode(kept, model)[0] == decode
    except UserError:
        unchanged = False
    if unchanged:
        changed = {}
    else:
        changed = {
            name: value
            for name, value in values.items()
            if value != kept.get(name, _DEFAULTS[name])
        }
    return ids | dict(kept) | ids | changed, _losses(decode)


def _losses(decode: DecodeConfig) -> list[str]:
    """Lines about options that `generate` does not know."""
    known = {*_SAME.values(), "length_penalty_kind", "early_stopping", "force_end", "bad_word_ids"}
    # Lengths that follow the source's become one that allows any, and the others ours alone.
    known |= {"max_length", "min_length", "max_length_factor", "max_length_extra", "batch_tokens"}
    known |= {"max_source_length", "alignment_layer", "alignment_head", "seed"}
    defaults = DecodeConfig()
    notes = [
        f"decode.{field.name}={getattr(decode, field.name)} is not known there, and left out"
        for field in dataclasses.fields(decode)
        if field.name not in known and getattr(decode, field.name) != getattr(defaults, field.name)
    ]
    if decode.length_penalty_kind == "gnmt" and decode.length_penalty and decode.beam_size > 1:
        notes.append(
            "decode.length_penalty_kind=gnmt is not known there: scores are divided by length**"
            f"{decode.length_penalty} instead; set length_penalty in generation_config.json to "
            "what you want"
        )
    return notes


def _bad_word_ids(
    phrases: Collection[Collection[int]], model: TransformerConfig
) -> tuple[str, ...]:
    """Returns the phrases, except tokens that our search never chooses anyway."""
    never = [[token] for token in forbidden_token_ids(model)]
    return tuple(",".join(map(str, map(int, ids))) for ids in phrases if list(ids) not in never)


def _lengths(values: Mapping[str, Any], model: TransformerConfig) -> dict[str, Any]:
    # The token that starts decoding is counted in lengths, but is not a new one.
    longest = values["max_new_tokens"] or max(values["max_length"] - 1, 0)
    shortest = values["min_new_tokens"] or max(values["min_length"] - 1, 0)
    if 0 < longest < model.max_length - 1:
        return {"min_length": shortest, "max_length": longest}
    return {"min_length": shortest, "max_length_factor": 2.0, "max_length_extra": 50}
