"""What each field of a configuration declares beside its docstring: its roles and its bounds.

    dropout_rate: float = option(0.1, FieldRole.TRAINING, lowest=0, below=1)

The roles decide what a change of the field means elsewhere: whether a run may be continued with
it, whether trained parameters still fit, whether a corpus is tokenized again. The bounds of numbers
are checked when a configuration is made and printed by `--help`. Both are written here only, so a
new field needs no entry in any list: a field without a role cannot be declared.
"""

import dataclasses
import difflib
import enum
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from flaxformer_mt.errors import UserError, UserTypeError

T = TypeVar("T")

MAX_WIDTH = 2**20
"""Limit of layer widths and of row lengths."""
MAX_LAYERS = 10_000
"""Limit of the number of layers."""
MAX_LENGTH = 2**17
"""Limit of the number of positions of a model, whose table is computed at every start."""
MAX_VOCABULARY = 2**24
"""Limit of vocabulary sizes."""
MAX_PARAMETERS = 10**12
"""Limit of the number of parameters of a model."""
MAX_INTEGER = 2**31 - 1
"""Limit of integers that declare no other: they are computed with as int32."""
MAX_SEED = 2**63 - 1
"""Limit of seeds."""
MAX_NUMBER = 1e12
"""Limit of real numbers that declare no other."""


class FieldRole(enum.Enum):
    """What depends on the value of a field. Most fields have one role, some have several."""

    # The parameters.
    SHAPES = "shapes"
    """The shapes of the parameters, or how many there are."""
    VOCABULARY = "vocabulary"
    """Which tokens there are and what their ids mean."""
    INITIALIZATION = "initialization"
    """The initial values of the parameters."""

    # The mathematics.
    ARCHITECTURE = "architecture"
    """The function that the model computes from its parameters, or which parameters it has."""
    TRAINING = "training"
    """How parameters are learned: dropout, the loss, the optimizer."""
    SELECTION = "selection"
    """Which checkpoints of a run count as better than others."""
    NUMERICS = "numerics"
    """Rounding or random draws of the same mathematics: precision, order of computation."""
    SEARCH = "search"
    """Which translations a trained model gives."""

    # The data.
    TEXT = "text"
    """Which sentence pairs are read and accepted; the data fingerprint covers them."""
    TOKENS = "tokens"
    """Which of these pairs are kept, and as which tokens: part of the key of the token store."""
    ROWS = "rows"
    """How stored tokens become batches."""

    # How a program runs.
    START = "start"
    """Only the start of a run; continuing it does not read the value again."""
    RUNNING = "running"
    """Nothing but where, how fast and how long a program runs, and what it reports and keeps."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The interval of a field's valid numbers. Infinity and NaN are never valid."""

    lowest: float
    highest: float
    excludes_lowest: bool = False
    excludes_highest: bool = False
    also: tuple[float, ...] = ()
    """Valid numbers outside the interval that have a meaning of their own, such as -1."""
    is_limit: bool = False
    """Whether the upper end only catches mistyped numbers; `--help` does not print it then."""

    def problem(self, value: float) -> str:
        """Returns what `value` must be ("must be at least 1"), or "" if it is valid."""
        if value in self.also:
            return ""
        sentinels = "".join(f", or {number}" for number in self.also)
        if value != value:
            return f"must be a finite number{sentinels}"
        if value < self.lowest or (self.excludes_lowest and value == self.lowest):
            relation = "above" if self.excludes_lowest else "at least"
            return f"must be {relation} {self.lowest}{sentinels}"
        if value > self.highest or (self.excludes_highest and value == self.highest):
            relation = "below" if self.excludes_highest else "at most"
            return f"must be {relation} {self.highest}{sentinels}"
        return ""

    def __str__(self) -> str:
        """The interval as `--help` prints it: "> 0", "in [0, 1)", "" if it goes without saying."""
        left, right = "(" if self.excludes_lowest else "[", ")" if self.excludes_highest else "]"
        if not self.is_limit:
            text = f"in {left}{self.lowest}, {self.highest}{right}"
        elif self.excludes_lowest:
            text = f"> {self.lowest}"
        elif self.lowest > 0:
            text = f">= {self.lowest}"
        else:
            return ""  # The docstring says what 0 and negative numbers mean.
        return " or ".join([text, *map(str, self.also)])


def option(
    default: T,
    *roles: FieldRole,
    lowest: float | None = None,
    above: float | None = None,
    highest: float | None = None,
    below: float | None = None,
    limit: float | None = None,
    also: float | None = None,
) -> T:
    """Declares a field of a configuration dataclass.

    Args:
      default: its value unless another is given.
      *roles: what depends on the field, at least one.
      lowest: the lowest valid number; for tuples of numbers, of each.
      above: a number that valid ones are greater than, instead of `lowest`.
      highest: the highest valid number.
      below: a number that valid ones are less than, instead of `highest`.
      limit: an upper bound, instead of `highest`, that only catches mistyped numbers; by default
        `MAX_INTEGER` or `MAX_NUMBER`.
      also: a sentinel accepted outside the interval, such as -1.
    """
    if not roles:
        raise TypeError("a configuration field needs a role")
    metadata: dict[str, Any] = {"roles": frozenset(roles)}
    lower, upper = (above if lowest is None else lowest), (highest if below is None else below)
    if lower is not None:
        default_limit = MAX_NUMBER if isinstance(default, float) else MAX_INTEGER
        metadata["bounds"] = Bounds(
            lower,
            (default_limit if limit is None else limit) if upper is None else upper,
            excludes_lowest=lowest is None,
            excludes_highest=below is not None,
            also=() if also is None else (also,),
            is_limit=upper is None,
        )
    elif _is_number(default):
        raise TypeError("a configuration field of numbers needs a lower bound")
    return dataclasses.field(default=default, metadata=metadata)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def roles_of(field: dataclasses.Field[Any]) -> frozenset[FieldRole]:
    """Returns the roles of a field; `TypeError` if it was not declared with `option`."""
    if "roles" not in field.metadata:
        raise TypeError(f"configuration field {field.name} is not declared with option()")
    return field.metadata["roles"]


def bounds_of(field: dataclasses.Field[Any]) -> Bounds | None:
    """Returns the bounds of the field's numbers; None if it holds no numbers."""
    return field.metadata.get("bounds")


def names_with(kind: type, *roles: FieldRole) -> frozenset[str]:
    """Returns the names of the fields of a configuration class that have any of the roles."""
    return frozenset(
        field.name for field in dataclasses.fields(kind) if not roles_of(field).isdisjoint(roles)
    )


def suggestion(name: str, names: Iterable[str]) -> str:
    """Returns "; did you mean d_model?" if one of the names resembles `name`, else ""."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """Returns a value as messages quote it: Python's notation, at most about 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits.
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}"


def require(condition: bool, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


def require_type(condition: bool, message: str) -> None:
    """Raises `UserTypeError` with the message unless the condition holds."""
    if not condition:
        raise UserTypeError(message)


Relation: TypeAlias = tuple[Callable[[Any], Any], str | Callable[[Any], str]]
"""A test, which is true of values that do not go together, and the message about them."""


class Checked:
    """Base class of frozen dataclasses that check their values when they are made."""

    _prefix = ""
    """Prefix of the names of fields in messages: "model."."""
    _relations = tuple[Relation, ...]()
    """Which values do not go together, see `relations.py`."""

    def __repr__(self) -> str:
        """The call that makes it, with the values that are not the defaults."""
        config: Any = self
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(config)]
        default = type(self)()
        given = [f"{name}={value!r}" for name, value in values if value != getattr(default, name)]
        return f"{type(self).__name__}({', '.join(given)})"

    def __post_init__(self) -> None:
        """Checks the type and the bounds of every field, and that values go together.

        Raises:
          UserTypeError: a value has the wrong type; names the option and the value.
          UserError: a value is out of bounds, or values do not go together; names them.
        """
        config: Any = self
        hints = type_hints(config.__class__)
        for field in dataclasses.fields(config):
            name = f"{self._prefix}{field.name}"
            check_value(getattr(self, field.name), hints[field.name], bounds_of(field), name)
        self._check()

    def _check(self) -> None:
        self.require(self._relations)

    def require(self, relations: Sequence[Relation]) -> None:
        """Raises `UserError` with the message of the first relation whose test is true."""
        for test, message in relations:
            if test(self):
                if callable(message):
                    raise UserError(message(self))
                raise UserError(re.sub(r"\{([\w.]+)\}", self._assignment, message))

    def _assignment(self, field: re.Match[str]) -> str:
        return f"{self._prefix}{field[1]}={operator.attrgetter(field[1])(self)}"


def check_value(value: Any, hint: Any, bounds: Bounds | None, name: str) -> None:
    """Checks a value, called `name`, against its type and its bounds; errors as of `validate`."""
    if typing.get_origin(hint) is tuple:
        require_type(isinstance(value, tuple), f"{name}={shown(value)}: must be a tuple")
        for number, (item, kind) in enumerate(items_of(value, hint, name)):
            check_value(item, kind, bounds, f"{name}.{number}")
        return
    choices = choices_of(hint)
    if choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        require(value in choices, f"{name}={shown(value)}: must be {expected}")
        return
    if hint is float:
        require_type(_is_number(value), f"{name}={shown(value)}: must be a number")
    else:
        valid = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        kind = _TYPE_NAMES.get(hint, hint.__name__)
        require_type(valid, f"{name}={shown(value)}: must be {kind}")
    if hint is str:
        require("\0" not in value, f"{name}={shown(value)}: must not contain null")
        is_unicode = not any("\ud800" <= character <= "\udfff" for character in value)
        require(is_unicode, f"{name}={shown(value)}: must be valid Unicode")
    if bounds is not None:
        problem = bounds.problem(value)
        require(not problem, f"{name}={shown(value)}: {problem}")


_TYPE_NAMES = {int: "an integer", bool: "True or False", str: "a string"}


@functools.cache
def type_hints(kind: type) -> dict[str, Any]:
    """Returns the resolved types of the fields of a configuration class, by name."""
    return typing.get_type_hints(kind)


def items_of(values: typing.Sequence[Any], hint: Any, name: str) -> list[tuple[Any, Any]]:
    """Returns each item of a tuple with its type; `UserError` for a wrong number of items."""
    kinds = typing.get_args(hint)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    require(len(values) == len(kinds), f"{name}: must have {len(kinds)} values")
    return list(zip(values, kinds, strict=True))


def choices_of(hint: Any) -> tuple[Any, ...]:
    """Returns the values that a Literal, or a union of Literals, admits; () for other types."""
    if typing.get_origin(hint) is typing.Union or isinstance(hint, types.UnionType):
        return tuple(choice for part in typing.get_args(hint) for choice in choices_of(part))
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
