"""Configurations as dictionaries and as JSON."""

import dataclasses
import json
import types
import typing
from typing import Any, Literal

from flaxformer_mt.config.experiment import ExperimentConfig
from flaxformer_mt.config.fields import require
from flaxformer_mt.errors import UserError


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts of JSON values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], kind: type = ExperimentConfig, prefix: str = "") -> Any:
    """The inverse of `to_dict`.

    Raises:
      UserError: a field is unknown, or its value has the wrong type.
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"unknown configuration field {prefix}{unknown[0]}")
    return kind(
        **{name: _typed(value, hints[name], f"{prefix}{name}") for name, value in values.items()}
    )


def _typed(value: Any, hint: Any, name: str) -> Any:
    """The value of the field `name`, made of JSON values, as the type that `hint` wants."""
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), f"configuration field {name} is no group")
        return from_dict(value, typing.cast(type, hint), f"{name}.")
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"configuration field {name} is no list")
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        require(len(value) == len(kinds), f"configuration field {name} needs {len(kinds)} values")
        return tuple(
            _typed(item, kind, f"{name}.{number}")
            for number, (item, kind) in enumerate(zip(value, kinds, strict=True))
        )
    choices = _choices(hint)
    if choices:
        valid = value in choices
    elif hint is float:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        valid = type(value) is hint
    require(valid, f"configuration field {name} cannot be {value!r}")
    return value


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a Literal, or a union of some, allows; none for other types."""
    if typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in _choices(part))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def to_json(config: ExperimentConfig) -> str:
    """The configuration as the text of a run folder's `config.json`."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str) -> ExperimentConfig:
    """The inverse of `to_json`.

    Raises:
      UserError: the text is no JSON object, or does not describe an experiment.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not a configuration: {error}") from error
    require(isinstance(values, dict), "not a configuration: no JSON object")
    require(
        "model_type" not in values,
        "a model of Hugging Face: make a run of its folder with `flaxformer-mt convert --from "
        "marian FOLDER RUN`",
    )
    return from_dict(values)
