"""Classes of layers that users register by name, with options that a run records.

A kind is a name, "moe", or a name with options, "moe(experts=8, top=2)". The options are fields of
the class. A run records the kind with all options (`Registry.resolved`), so that a change of the
defaults is noticed.
"""

import ast
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import linen as nn

from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError

Class = TypeVar("Class", bound=type[nn.Module])


class Registry:
    """The classes that a field of the model's configuration can name."""

    def __init__(self, field: str, decorator: str, built_in: str, base: type[nn.Module]) -> None:
        """Creates a registry.

        Args:
          field: the name of the field, "attention_kind".
          decorator: the name of the public function that registers a class.
          built_in: the kind of the built-in class.
          base: the built-in class, of which the others are subclasses.
        """
        self._field = field
        self._decorator = decorator
        self._built_in = built_in
        self._base = base
        self.classes: dict[str, type[nn.Module]] = {built_in: base}

    def register(self, name: str) -> Callable[[Class], Class]:
        """Returns a decorator that registers a class; registering a name again replaces it.

        Raises:
          TypeError: the name is not a string, or the class is not a subclass of the built-in one.
          UserError: the name is not an identifier, or is that of the built-in class.
        """
        if not isinstance(name, str):
            raise TypeError(f"{self._decorator}: the name must be a string, not {name!r}")
        if name == self._built_in:
            raise UserError(f"{name} is the built-in {self._field}: give yours another name")
        if not name.isidentifier():
            raise UserError(f"{self._decorator}({name!r}): use letters, digits and underscores")

        def register(kind: Class) -> Class:
            if not (isinstance(kind, type) and issubclass(kind, self._base)):
                raise TypeError(f"{name} must be a subclass of {self._base.__name__}")
            if name in self.classes:
                jax.clear_caches()  # Compiled programs are found by the configuration.
            self.classes[name] = kind
            return kind

        return register

    def of(self, kind: str) -> Callable[..., Any]:
        """Returns the class of a kind, with its options bound.

        Raises:
          UserError: the class is not registered, or does not have such options.
        """
        name, given = self._parsed(kind)
        return functools.partial(self.classes[name], **given)

    def resolved(self, kind: str) -> str:
        """Returns a kind with all options of its class, in the order of their names."""
        name, given = self._parsed(kind)
        options = self._defaults(name) | given
        values = ", ".join(f"{option}={options[option]!r}" for option in sorted(options))
        return f"{name}({values})" if options else name

    def _parsed(self, kind: str) -> tuple[str, dict[str, Any]]:
        name, has_options, _ = kind.partition("(")
        given = {}
        if has_options:
            try:
                call = ast.parse(kind, mode="eval").body
                if not isinstance(call, ast.Call) or call.args:
                    raise ValueError("options have names")
                given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
            except (SyntaxError, ValueError) as error:
                raise UserError(
                    f"model.{self._field}={kind!r} is not of the form NAME(OPTION=VALUE, ...)"
                ) from error
        if name not in self.classes:
            raise UserError(
                f"model.{self._field}={name} is not registered: import the file that calls "
                f"{self._decorator}({name!r}) first; registered are {', '.join(self.classes)}"
            )
        defaults = self._defaults(name)
        for option, value in given.items():
            if option not in defaults:
                known = ", ".join(defaults) or "none"
                raise UserError(
                    f"model.{self._field}: {name} has no option {option!r} (it has {known})"
                    f"{suggestion(option, defaults)}"
                )
            if type(value) is not type(defaults[option]):
                wanted = type(defaults[option]).__name__
                raise UserError(f"model.{self._field}: {option}={value!r} must be of type {wanted}")
        return name, given

    def _defaults(self, name: str) -> dict[str, Any]:
        inherited = {field.name for field in dataclasses.fields(self._base)}
        fields = dataclasses.fields(self.classes[name])
        return {field.name: field.default for field in fields if field.name not in inherited}
