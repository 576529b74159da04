"""The entry point: finds the command, parses its options and calls it."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flaxformer_mt import runtime
from flaxformer_mt.cli import checkpoints, convert, corpora, evaluate, help_text, parity, translate
from flaxformer_mt.cli.options import configured_search
from flaxformer_mt.errors import UserError

COMMANDS: dict[str, dict[str, Callable[..., int | None]]] = {
    "Data": {
        "prepare": corpora.prepare,
    },
    "Trained models": {
        "translate": translate.translate,
        "score": translate.score,
        "evaluate": evaluate.evaluate,
        "inspect": checkpoints.inspect,
        "average": checkpoints.average,
        "lexicon": corpora.lexicon,
    },
    "Published models": {
        "convert": convert.convert,
        "parity": parity.parity,
    },
}
"""Groups of commands, in the order of `--help`. Expensive imports belong inside the functions."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command given by `arguments`, by default those of the process.

    Returns:
      The exit code: 0 on success; 1 after a UserError, or if `parity` finds a difference.

    Raises:
      SystemExit: with code 2 for invalid options, with code 0 after `--help`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    runtime.configure()
    try:
        return _run(arguments)
    except UserError as error:
        print(f"flaxformer-mt: error: {_with_option_names(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader is gone. Python flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    commands = {name: command for group in COMMANDS.values() for name, command in group.items()}
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        raise SystemExit(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else "see flaxformer-mt --help"
        print(f"flaxformer-mt: error: unknown command {name}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    command = commands[name]
    defaults: dict[str, Any] = {}
    if "decode" in inspect.signature(command).parameters:
        defaults["decode"] = configured_search(options)
    return help_text.call(command, f"flaxformer-mt {name}", options, **defaults) or 0


def overview() -> str:
    """Returns the help of the program: its commands, one per line."""
    lines = [
        "usage: flaxformer-mt COMMAND [OPTIONS]",
        "",
        "Machine translation with encoder-decoder Transformers.",
    ]
    for title, commands in COMMANDS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<11}{help_text.summary(each)}" for name, each in commands.items()]
    lines += ["", "flaxformer-mt COMMAND --help describes the options of a command."]
    return "\n".join(lines)


def _with_option_names(message: str) -> str:
    """Replaces fields of `DecodeConfig` in a message by the options that set them."""
    return re.sub(r"\bdecode\.(\w+)", lambda field: "--" + field[1].replace("_", "-"), message)
