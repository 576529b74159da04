"""The commands of the documentation run, on tiny models, and print what the pages show.

`test_blocks.py` parses them all in every test run.
"""

import pytest
import torch
from documentation import outputs, programs, shell, workspaces
from documentation.pages import BLOCKS

RUN = {}
for _block in BLOCKS:
    RUN.setdefault(_block.page, []).append(_block)


@pytest.fixture
def default_dtype():
    """Restores the default dtype of PyTorch, which pages set."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("page", RUN)
def test_commands_print_what_the_page_shows(page, trained_run, tmp_path, monkeypatch):
    workspaces.prepare(tmp_path, page, RUN[page], trained_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    names = workspaces.names(tmp_path, page)
    differences, last = [], ("", "")
    for block in RUN[page]:
        if block.reason is not None:
            continue
        if block.file is not None:
            workspaces.write(tmp_path / block.file, block.lines)
        elif block.is_output:
            found = outputs.difference(last[0], ["...", *block.lines, "..."], last[1])
            differences += [f"{block}: {found}"] if found else []
        elif block.language in ("sh", "console"):
            for command in block.commands():
                code, printed = shell.run(command.text, tmp_path)
                found = wrong(command, code, printed)
                differences += [f"{block}: $ {command.text}\n{found}"] if found else []
                last = command.text, printed
        elif block.language == "python":
            found, printed = programs.run(block, names)
            differences += [found] if found else []
            last = "python", printed
    assert not differences, "\n\n".join(differences)


def wrong(command, code, printed):
    """Returns how the result of a command differs from what the page shows, or ""."""
    if code != 0 and not any("error: " in line for line in command.output or ()):
        return f"it fails with code {code}:\n{printed}"
    if command.output is None:
        return ""
    return outputs.difference(command.text, command.output, printed)
