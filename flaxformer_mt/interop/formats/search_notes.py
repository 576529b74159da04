"""Says which search options a format cannot contain."""

import dataclasses
from collections.abc import Collection

from flaxformer_mt.config import DecodeConfig

WITHOUT_EFFECT = frozenset({
    "batch_tokens", "num_devices", "max_source_length", "alignment_layer", "alignment_head", "seed",
})  # fmt: skip
"""Options that do not decide which translation is found for a sentence."""


def unsupported_options(
    decode: DecodeConfig, supported: Collection[str], program: str
) -> list[str]:
    """Returns a line about each option that a program does not support.

    `supported` are the fields with a counterpart, besides those of `WITHOUT_EFFECT`.
    """
    known = {*supported, *WITHOUT_EFFECT}
    return [
        f"decode.{field.name}={getattr(decode, field.name)} is not supported by {program}"
        for field in dataclasses.fields(decode)
        if field.name not in known and getattr(decode, field.name) != field.default
    ]
