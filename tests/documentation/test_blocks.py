"""The code blocks of the documentation have a known form, and name options that exist.

`pages` describes the forms.
"""

import ast
import contextlib
import functools
import re
import shlex

import pytest
from documentation.pages import BLOCKS, LANGUAGES, PAGES, REASONS, ROOT, prose

from flaxformer_mt import cli
from flaxformer_mt.cli import help_text, preparation, program, training
from flaxformer_mt.errors import UserError

PROGRAMS = ("flaxformer-mt", "train.py")


def test_blocks_name_their_language_and_why_they_are_not_run():
    for block in BLOCKS:
        assert block.language in LANGUAGES, block
        assert block.reason in {None, *REASONS}, block
        assert block.language not in ("sh", "console") or block.commands(), block


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_commands_are_in_fenced_blocks():
    for page in PAGES:
        assert not re.search(r"^ {4}(\$ |flaxformer-mt |python |pip )", prose(page), re.M), page


def programs_called(text):
    """Yields the arguments of each of our programs in a command line, with the program first."""
    words = shlex.shlex(text, posix=True, punctuation_chars="|<>;&")
    words.whitespace_split = True
    call: list[str] | None = None
    skip = False
    for word in [*words, ";"]:
        if set(word) <= set("|;&<>"):
            skip = set(word) <= set("<>")
            if not skip and call is not None:
                yield call
            call = call if skip else None
        elif skip:
            skip = False
        elif call is not None:
            call.append(word)
        elif word.rpartition("/")[2] in PROGRAMS:
            call = [word.rpartition("/")[2]]


CALLS = [
    pytest.param(
        call, any("error: " in line for line in command.output or ()), id=f"{block}-{call[1]}"
    )
    for block in BLOCKS
    if block.language in ("sh", "console")
    for command in block.commands()
    for call in programs_called(command.text)
]
COMMANDS = {name: each for group in program.COMMANDS.values() for name, each in group.items()}


@pytest.mark.parametrize(("call", "is_mistake"), CALLS)
def test_options_exist(call, is_mistake):
    """The options of the commands are parsed, and the commands are not called."""
    with contextlib.suppress(UserError) if is_mistake else contextlib.nullcontext():
        parse(*call)


def parse(name, *arguments):
    if name == "train.py" or arguments[0] == "train":
        check_training(arguments if name == "train.py" else arguments[1:])
    elif arguments[0] == "prepare":
        check_training(arguments[1:], preparation.parse)
    elif arguments != ("--version",):
        command, *options = (word.replace("s3://bucket/", "") for word in arguments)
        called = []

        @functools.wraps(COMMANDS[command])
        def parsed(**values):
            called.append(values)

        help_text.call(parsed, "flaxformer-mt", options)
        assert called


def check_training(arguments, parse_options=training.parse_flags):
    """Parses the command line, for a configuration that may be an example's own."""
    configs = [word for word in arguments if word.startswith("--config=")]
    existing = [word for word in configs if (ROOT / word.partition("=")[2]).is_file()]
    assert len(configs) == 1
    given = [word for word in arguments if word not in configs]
    if not {"--help"} & {*given}:
        path = existing[0].partition("=")[2] if existing else "configs/forkme.py"
        parse_options([f"--config={ROOT / path}", *given])


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_is_python(block):
    text = "\n".join(block.lines)
    if text.startswith(">>> "):
        text = "\n".join(line[4:] for line in block.lines if line.startswith((">>> ", "... ")))
    ast.parse(text)


def test_options_in_the_text_exist(capsys):
    """Options between backquotes, of our programs or of the benchmarks."""
    known = {"--help", "--version"}
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        known |= options_in(capsys.readouterr().out)
    for path in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").glob("*.py")):
        known |= options_in(path.read_text(encoding="utf-8"))
    for page in PAGES:
        for code in re.findall(r"`(--[^`]+)`", prose(page)):
            named = {each for each in options_in(code) if not each.startswith("--xla_")}
            if code.split()[0] not in OF_OTHERS:
                assert named <= known, f"{page}: {code}"


OF_OTHERS = {"--paired-bs", "--paired-ar", "--gpus"}
"""Options of sacreBLEU and Docker."""


def options_in(text):
    return set(re.findall(r"--[a-z][\w.-]*\w", text))
