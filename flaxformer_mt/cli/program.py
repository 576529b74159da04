"""The commands: finds the one that is named, parses its options and calls it."""

import dataclasses
import inspect
import logging
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import flaxformer_mt
from flaxformer_mt import exit_codes, runtime
from flaxformer_mt.cli import (
    checkpoints,
    configs,
    convert,
    doctor,
    evaluate,
    help_text,
    parity,
    pictures,
    preparation,
    score,
    serve,
    training,
    translate,
)
from flaxformer_mt.cli.options import configured_search
from flaxformer_mt.cli.unknown_options import option_names, require_known
from flaxformer_mt.config import DecodeConfig
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.errors import UserError
from flaxformer_mt.exit_codes import ExitCode
from flaxformer_mt.memory_limits import require_address_space

_GROUPS: dict[str, tuple[Callable[..., int | None], ...]] = {
    "Training": (preparation.prepare, training.train, configs.configs, doctor.doctor),
    "Trained models": (
        translate.translate,
        score.score,
        evaluate.evaluate,
        checkpoints.inspect,
        pictures.plot,
        pictures.attention,
        checkpoints.average,
        checkpoints.publish,
        score.lexicon,
        serve.serve,
    ),
    "Published models": (convert.convert, parity.parity),
}
COMMANDS = {
    title: {command.__name__: command for command in group} for title, group in _GROUPS.items()
}
"""Groups of commands, in the order of `--help`. Expensive imports belong inside the functions.

The options of `train`, which `entry_points` calls, and of `prepare` are a configuration."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command given by `arguments`, and returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="flaxformer-mt: warning: %(message)s")
    runtime.configure()
    commands = {name: command for group in COMMANDS.values() for name, command in group.items()}
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        raise SystemExit(ExitCode.SUCCESS)
    if name == "--version":
        print(f"flaxformer-mt {flaxformer_mt.__version__}")
        raise SystemExit(ExitCode.SUCCESS)
    if name not in commands:
        hint = suggestion(name, commands) or "; see flaxformer-mt --help"
        print(f"flaxformer-mt: error: unknown command {name}{hint}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)
    if name == "prepare":
        return preparation.run(options)
    command = commands[name]
    defaults: dict[str, Any] = {}
    require_address_space()
    hints = typing.get_type_hints(command, include_extras=True)
    require_known(options, [*option_names(hints)], f"flaxformer-mt {name}")
    try:
        if "decode" in inspect.signature(command).parameters:
            defaults["decode"] = configured_search(options)
        return help_text.call(command, f"flaxformer-mt {name}", options, **defaults) or 0
    except UserError as error:
        raise UserError(_with_option_names(str(error))) from error


def overview() -> str:
    """Returns the help of the program: its commands, one per line."""
    lines = [
        "usage: flaxformer-mt COMMAND [OPTIONS]  or  flaxformer-mt --version",
        "Machine translation with Transformers. COMMAND --help describes the options.",
    ]
    for title, commands in COMMANDS.items():
        lines += ["", f"{title}:"]
        lines += [
            f"  {name:<11}{inspect.getdoc(command).splitlines()[0]}"  # type: ignore[union-attr]
            for name, command in commands.items()
        ]
    lines += ["", f"Exit codes: {exit_codes.summary()}."]
    return "\n".join(lines)


def _with_option_names(message: str) -> str:
    names = "|".join(field.name for field in dataclasses.fields(DecodeConfig))
    return re.sub(
        rf"(?<![\w./-])decode\.({names})\b",
        lambda field: "--" + field[1].replace("_", "-"),
        message,
    )
