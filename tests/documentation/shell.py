"""Runs the command lines of the documentation in a folder.

Our programs run in this process, where everything is imported and compiled already. Whatever needs
more of a shell than redirections runs in bash, with our programs in its path.
"""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

from documentation.pages import ROOT

from flaxformer_mt.cli import entry_points

FEWER_STEPS = (
    "--train.num-steps=6", "--train.eval-every=6", "--train.checkpoint-every=3",
    "--train.batch-tokens=2048", "--train.eval-sentences=4",
)  # fmt: skip
PROGRAM = f"""#!{sys.executable}
import sys
from flaxformer_mt.cli import main
sys.exit(main())
"""


def prepare(folder: Path) -> None:
    """Writes what the commands expect of a clone of the repository, except for its configs."""
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    scripts = {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n', "flaxformer-mt": PROGRAM}
    for name, text in scripts.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    (folder / "train.py").symlink_to(ROOT / "train.py")


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of programs that bash starts."""
    return {
        **os.environ,
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }


def run(text: str, folder: Path) -> tuple[int, str]:
    """Runs a command line in the current folder.

    Returns:
      Its exit code, and what it prints, errors included.
    """
    call = _simple_call(text)
    if call is not None:
        return _call(*call)
    result = subprocess.run(
        ["bash", "-c", text],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout


def _simple_call(text: str) -> tuple[list[str], str | None, str | None] | None:
    """Returns the arguments, the input file and the output file of a call of our programs.

    None if the line is another command, or more than this call.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|<>;&")
    lexer.whitespace_split = True
    words = list(lexer)
    files: dict[str, str] = {}
    for sign in ("<", ">"):
        if sign in words:
            index = words.index(sign)
            files[sign] = words[index + 1]
            del words[index : index + 2]
    name = words[0].removeprefix(".venv/bin/")
    if any(set(word) <= set("|<>;&") for word in words) or "$(" in text:
        return None
    if name == "python" and words[1:2] == ["train.py"]:
        words[1] = "train"
    elif name != "flaxformer-mt":
        return None
    return [*words[1:], *_fewer_steps(words[1:])], files.get("<"), files.get(">")


def _fewer_steps(arguments: list[str]) -> list[str]:
    """Returns options that end the training of a converted model soon, unless they are given."""
    if arguments[0] != "train" or not any(word.endswith("config.json") for word in arguments):
        return []
    given = {word.partition("=")[0] for word in arguments}
    return [option for option in FEWER_STEPS if option.partition("=")[0] not in given]


class _Terminal(io.TextIOWrapper):
    """What is printed on a terminal; without colours, as TERM is dumb."""

    def isatty(self) -> bool:
        return True


def _call(arguments: list[str], source: str | None, target: str | None) -> tuple[int, str]:
    """Calls our program with its standard streams replaced."""
    # A run's line that moves is no part of what it prints; reports are shown as in a file.
    kind = io.TextIOWrapper if arguments[0] in ("train", "parity") else _Terminal
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.ExitStack() as stack:
        output = (
            kind(errors.buffer, encoding="utf-8", write_through=True)
            if target is None
            else stack.enter_context(open(target, "w", encoding="utf-8"))
        )
        given = stack.enter_context(open(source or os.devnull, "rb"))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.callback(setattr, sys, "stdin", sys.stdin)
        sys.stdin = types.SimpleNamespace(buffer=given)
        try:
            code = entry_points.main(arguments)
        except SystemExit as error:  # After --help and --version.
            code = error.code
        text = errors.buffer.getvalue().decode()
        if target is None:
            output.detach()
    return code, text
