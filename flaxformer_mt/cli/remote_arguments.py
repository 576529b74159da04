"""Remote paths on the command line, such as s3://bucket/run, replaced by those of local copies."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flaxformer_mt.cli.unknown_options import option_hints
from flaxformer_mt.errors import UserError
from flaxformer_mt.remote import copies
from flaxformer_mt.remote.run_folders import training_folder
from flaxformer_mt.remote.stores import url_of

_URL = re.compile(r"(--[\w.-]+=)?([a-z][a-z0-9+.-]+://.*)", re.DOTALL)
_OF_SEVERAL = ("--coordinator", "--num-processes", "--process-id", "--cluster")
_OF_PARTS = ("--resume", "--shard")


def with_copies(arguments: Sequence[str], hints: Mapping[str, Any]) -> list[str]:
    """Replaces the remote paths of a command, but in options that are no paths.

    Raises:
      UserError: a store cannot be used, or the output would be written in parts.
    """
    kinds = dict(option_hints(hints))
    result = []
    option = ""
    """The option whose values follow; "" among positional arguments."""
    for argument in arguments:
        is_option = argument.startswith("--")
        if is_option:
            option = argument.partition("=")[0]
        kind = str(kinds.get(option.removeprefix("--"), "Path"))
        result.append(_with_copy(argument, option, arguments) if "Path" in kind else argument)
        if ("=" in argument) if is_option else ("tuple" not in kind):
            option = ""
    return result


def _with_copy(argument: str, option: str, arguments: Sequence[str]) -> str:
    found = _URL.fullmatch(argument)
    if not found or not url_of(found[2]):
        return argument
    parts = [each for each in arguments if each.partition("=")[0] in _OF_PARTS]
    if option == "--output" and parts:
        raise UserError(
            f"{parts[0]} continues the parts of a local --output: give a local file, and copy it "
            f"to {found[2]} at the end"
        )
    return f"{found[1] or ''}{copies.local(found[2])}"


@contextlib.contextmanager
def run_folder(arguments: Sequence[str], is_read: bool) -> Iterator[list[str]]:
    """Yields the arguments of a command that trains or prepares, with a copy of its run folder.

    Args:
      arguments: of the command line; paths in fields of the configuration remain as they are.
      is_read: whether it does not train, and needs no lease; what it adds is published at the end.

    Raises:
      UserError: a store cannot be used, another process trains there, or several would.
    """
    given = list(arguments)
    with contextlib.ExitStack() as stack:
        for place, argument in enumerate(given):
            previous = given[place - 1] if place else ""
            name, equals, value = argument.partition("=")
            if previous in ("--config", "--workdir"):
                name, equals, value = previous, "", argument
            url = url_of(value) if name in ("--config", "--workdir") and "://" in value else None
            if url is None:
                continue
            if name == "--config" or is_read:
                folder = copies.local(url)
            else:
                _require_alone(given, url)
                folder = stack.enter_context(training_folder(url))
            given[place] = f"{name}={folder}" if equals else str(folder)
        yield given
        copies.publish()


def _require_alone(arguments: Sequence[str], url: str) -> None:
    names = {each.partition("=")[0] for each in arguments}
    if several := names & {*_OF_SEVERAL}:
        raise UserError(
            f"{min(several)}: several processes train in a folder on a file system that they share,"
            f" and {url} is none: mount it (gcsfuse, mount-s3)"
        )
    if "--find-learning-rate" in names:
        raise UserError(
            f"--find-learning-rate draws a picture beside a local --workdir, and {url} is remote: "
            "give a local one"
        )
