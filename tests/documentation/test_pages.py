"""The commands of the documentation run, on tiny models, and print what the pages show.

`test_blocks.py` parses them all in every test run.
"""

import pytest
from documentation import outputs, programs, shell, workspaces
from documentation.pages import BLOCKS

RUN = {}
for _block in BLOCKS:
    RUN.setdefault(_block.page, []).append(_block)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN)
def test_commands_print_what_the_page_shows(page, trained_run, tmp_path, monkeypatch):
    workspaces.prepare(tmp_path, page, RUN[page], trained_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    names = workspaces.names(tmp_path, page)
    differences = []
    for block in RUN[page]:
        if block.reason is not None:
            continue
        if block.file is not None:
            workspaces.write(tmp_path / block.file, block.lines)
        elif block.language in ("sh", "console"):
            found = (wrong_command(block, command, tmp_path) for command in block.commands())
            differences += filter(None, found)
        elif block.language == "python":
            differences += filter(None, [programs.run(block, names)])
    assert not differences, "\n\n".join(differences)


def wrong_command(block, command, folder):
    """Runs a command; returns how it differs from the page, or ""."""
    code, printed = shell.run(command.text, folder)
    difference = ""
    if code != 0 and not any("error: " in line for line in command.output or ()):
        difference = f"it fails with code {code}:\n{printed}"
    elif command.output is not None:
        difference = outputs.difference(command.text, command.output, printed)
    return difference and f"{block}: $ {command.text}\n{difference}"
