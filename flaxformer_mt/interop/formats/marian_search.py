"""Converts the options of Marian's decoder to our search options, and back.

Defaults and suppressed tokens are those of Marian's `config_parser.cpp`, `beam_search.cpp` and
`sentencepiece_vocab.cpp`.
"""

from collections.abc import Mapping
from typing import Any

from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.data.tokenizers.tokenizer import Tokenizer
from flaxformer_mt.interop.formats.search_notes import unsupported_options

# Options with a counterpart, and Marian's defaults.
_SAME = {
    "beam-size": ("beam_size", 12),
    "normalize": ("length_penalty", 0.0),
    "max-length-factor": ("max_length_factor", 3.0),
}
_CONTROL_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(32))


def to_decode(
    options: Mapping[str, Any], target: Tokenizer
) -> tuple[DecodeConfig, tuple[str, ...]]:
    """Converts options of Marian's decoder to search options.

    Without options, which Marian then takes from its command line, beam and lengths are our
    defaults.

    Returns:
      The search options, and a line about each unsupported option.

    Raises:
      UserError: a value is invalid.
    """
    fields: dict[str, Any] = {}
    if options:
        given = {name: value for name, value in options.items() if value is not None}
        fields = {ours: given.get(theirs, value) for theirs, (ours, value) in _SAME.items()}
    suppressed = [
        *([] if options.get("allow-unk") else [target.unk_id]),
        *([] if options.get("allow-special") else _control_ids(target)),
    ]
    decode = DecodeConfig(
        length_penalty_kind="average", bad_word_ids=tuple(map(str, suppressed)), **fields
    )
    notes = []
    if options.get("shortlist"):
        notes.append("its shortlist is ignored: translations may contain any token")
    notes += [
        f"{name}={options[name]} is not supported, and ignored"
        for name in ("word-penalty", "output-sampling", "force-decode")
        if options.get(name)
    ]
    return decode, tuple(notes)


def from_decode(decode: DecodeConfig, target: Tokenizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Converts search options to options of Marian's decoder.

    Returns:
      The options, and a line about each option without a counterpart.
    """
    forbidden = set(decode.bad_word_ids)
    unknown, control = {str(target.unk_id)}, set(map(str, _control_ids(target)))
    options = {theirs: getattr(decode, ours) for theirs, (ours, _) in _SAME.items()}
    supported = {"length_penalty_kind", "max_length_extra", *(ours for ours, _ in _SAME.values())}
    notes = []
    if decode.length_penalty_kind != "average":
        options["normalize"] = 0.0
        if decode.length_penalty and decode.beam_size > 1:
            notes.append(
                f"decode.length_penalty={decode.length_penalty} of length_penalty_kind=gnmt is not "
                "supported by Marian, which divides scores by length**normalize: adjust normalize "
                "in config.yml if needed"
            )
    if not unknown <= forbidden:
        options["allow-unk"] = True
    if not control <= forbidden:
        options["allow-special"] = True
    if forbidden <= unknown | control:
        supported.add("bad_word_ids")
    return options, (*notes, *unsupported_options(decode, supported, "Marian"))


def _control_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the bytes 0 to 31, which a vocabulary with byte fallback has."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return [token for token, piece in enumerate(pieces) if piece in _CONTROL_PIECES]
