"""The command `configs`: the configurations that come with the package."""

import ast
from pathlib import Path
from typing import Annotated

import tyro

from flaxformer_mt import atomic
from flaxformer_mt.cli import output
from flaxformer_mt.config.fields import suggestion
from flaxformer_mt.config.files import included
from flaxformer_mt.errors import UserError


def configs(copy: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [FILE]")] = ()) -> None:
    """Lists the included configurations, or copies one of them to a file.

    Their names are values of --config, in any folder. A copy can be edited.

    Examples:
      flaxformer-mt configs
      flaxformer-mt configs --copy forkme mine.py
      flaxformer-mt train --config=mine.py --workdir=RUN --data.path=TEXT

    Args:
      copy: Name of the configuration to copy, and the file to write (default: NAME.py).
    """
    files = included()
    if not copy:
        width = max(map(len, files))
        output.print_lines(f"{name:<{width}}  {_summary(file)}" for name, file in files.items())
        return
    name, *targets = copy
    if len(targets) > 1:
        raise UserError(f"--copy {' '.join(copy)}: give a name and at most one file")
    if name not in files:
        hint = suggestion(name, files) or "; flaxformer-mt configs lists them"
        raise UserError(f"--copy {name}: there is no such configuration{hint}")
    path = Path(*targets) if targets else Path(f"{name}.py")
    if path.exists():
        raise UserError(f"{path} exists: remove it, or give another file, as in --copy {name} FILE")
    atomic.write_bytes(path, files[name].read_bytes())
    output.print_lines([f"{path}: train with --config={path}"])


def _summary(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]
