"""Configurations as dictionaries and as JSON."""

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from flaxformer_mt.config.experiment import ExperimentConfig
from flaxformer_mt.config.fields import (
    Bounds,
    bounds_of,
    check_value,
    items_of,
    require,
    shown,
    suggestion,
    type_hints,
)
from flaxformer_mt.errors import UserError, prefixed
from flaxformer_mt.input_files import parse_json


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = ExperimentConfig, prefix: str = "") -> Any:
    """Makes a configuration from nested dictionaries; the inverse of `to_dict`.

    Absent fields get their defaults. `prefix` is that of field names in messages: "model.".
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in sorted(values.keys() - fields.keys()):
        hint = suggestion(f"{prefix}{name}", [f"{prefix}{field}" for field in fields])
        raise UserError(f"unknown configuration field {prefix}{name}{hint}")
    hints = type_hints(kind)
    return kind(
        **{
            name: _from_json_value(value, hints[name], bounds_of(fields[name]), f"{prefix}{name}")
            for name, value in values.items()
        }
    )


def _from_json_value(value: Any, hint: Any, bounds: Bounds | None, name: str) -> Any:
    """Converts lists to tuples and dictionaries to configurations, and checks all other values."""
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), f"{name}={shown(value)}: must be a group of fields")
        return from_dict(value, typing.cast(type, hint), f"{name}.")
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{name}={shown(value)}: must be a list")
        return tuple(
            _from_json_value(item, kind, bounds, f"{name}.{number}")
            for number, (item, kind) in enumerate(items_of(value, hint, name))
        )
    check_value(value, hint, bounds, name)
    return value


HISTORY = "history"
"""The member of `config.json` that lists how options were changed in the course of a run."""


def to_json(config: ExperimentConfig, history: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns a configuration as the text of a run folder's `config.json`."""
    values = to_dict(config) | ({HISTORY: [*history]} if history else {})
    return json.dumps(values, indent=2) + "\n"


def from_json(text: str | bytes) -> ExperimentConfig:
    """Makes a configuration from JSON; the inverse of `to_json`. Errors as of `from_dict`."""
    with prefixed("not a configuration: "):
        values: dict[str, Any] = parse_json(text, "it", dict[str, Any])
    require(
        "model_type" not in values,
        "this is the configuration of a Hugging Face model: make a run of its folder with "
        "`flaxformer-mt convert --from marian FOLDER RUN`",
    )
    values.pop(HISTORY, None)
    return from_dict(values)
