"""The exception for invalid input."""

import contextlib
from collections.abc import Iterator

_LONGEST_MESSAGE = 4000
_shown: dict[str, str] = {}
_CONTROL_CHARACTERS = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0xD800, 0xE000))
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CONTROL_CHARACTERS}


def show_as(path: str, name: str) -> None:
    """Makes messages name what a path is a copy of, such as a URL, in place of the path."""
    _shown[path] = name


def shown(text: str) -> str:
    """Returns a text in which copies have the names of what they are copies of."""
    for path, name in _shown.items():
        text = text.replace(path, name)
    return text


class UserError(Exception):
    """Raised for input that cannot be used: options, files, data.

    The message is one line that names the option or file and says what to do. It is raised before
    anything is written. The entry points (`train.py`, `flaxformer-mt`) print the message without a
    traceback and exit with code 1; the command `parity`, whose code 1 is a difference, with 2.

    Messages quote the input, which may be anything: control characters and line ends are escaped,
    and the middle of a message of more than 4000 characters is omitted.
    """

    def __init__(self, message: str) -> None:
        message = shown(message)
        if len(message) > _LONGEST_MESSAGE:
            half = _LONGEST_MESSAGE // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message.translate(_ESCAPES))


class UserTypeError(UserError, TypeError):
    """Raised for a value of the wrong type, which a program may have passed, too."""


@contextlib.contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Puts a prefix, such as "FILE: ", before the message of `UserError`s of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{prefix}{error}") from error


@contextlib.contextmanager
def requiring(
    user: str, install: str, package: str = "a package that is not installed"
) -> Iterator[None]:
    """Says what to install for `user`, if the block cannot import a package."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{user} needs {package}: pip install {install}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, or the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def unusable(error: OSError) -> UserError:
    """Returns the `UserError` for a file that the operating system cannot use, which it names."""
    reason = error.strerror or str(error)
    return UserError(reason if error.filename is None else f"{error.filename}: {reason}")
