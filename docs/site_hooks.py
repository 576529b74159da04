"""Hooks of the site (mkdocs.yml): pages of files that lie elsewhere in the repository.

README.md is the first page of the site. A link to another file of the repository, such as
`../examples/lora.py`, leads to a page that shows the file. So every link works on GitHub, where
pages are read as they are, and in the site, which needs no repository beside it.
"""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site by the file of the repository that they are."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json"}
_LINK = re.compile(r"\]\(([^()\s#:]+)(#[^()\s]*)?\)")
_CODE = re.compile(r"`[^`\n]+`")
_HEADING_OF_ENTRY = re.compile(r"^#+ (.+)\n\n(?=::: )", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of README.md and the like, and of the files that any page links to."""
    for path, uri in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
    linked = {
        path
        for file in files.documentation_pages()
        for path in linked_paths(file.content_string, folder_of(file.src_uri))
        if uri_of(path) not in files.src_uris
    }
    shown = {path for folder in linked for path in shown_files(folder)}
    for path in sorted(linked | shown):
        files.append(File.generated(config, uri_of(path), content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links to files of the repository links to their pages, and removes double headings."""
    folder = folder_of(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if not (ROOT / path).exists():
            return link[0]
        target = posixpath.relpath(uri_of(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"]({target}{link[2] or ''})"

    # mkdocstrings writes the heading of an entry; on GitHub there is only that of the page.
    markdown = _HEADING_OF_ENTRY.sub(r'<a id="\1"></a>\n\n', markdown)
    # GitHub needs the backslash in tables; Python-Markdown would show it.
    markdown = _CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    return _LINK.sub(replaced, markdown)


def folder_of(uri: str) -> str:
    """The folder of the repository that the links of a page are relative to."""
    if uri in PAGES.values() or uri.startswith("files/"):
        return ""
    return posixpath.join("docs", posixpath.dirname(uri))


def linked_paths(text: str, folder: str) -> Iterator[str]:
    """Yields the files and folders of the repository that a page links to."""
    for target, _ in _LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if (ROOT / path).exists():
            yield path


def uri_of(path: str) -> str:
    """The page, or the file of the site, that a file or folder of the repository is."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return f"files/{path}.md"


def shown_files(path: str) -> list[str]:
    """The files of a folder that have a page of their own: programs, not data."""
    if not (ROOT / path).is_dir():
        return []
    names = sorted(os.listdir(ROOT / path))
    return [f"{path}/{name}" for name in names if name.endswith(".py")]


def page_of(path: str) -> str:
    """The text of a page that shows a file, or lists the files of a folder."""
    title = f"# {path}\n\n"
    if (ROOT / path).is_dir():
        names = sorted(
            name for name in os.listdir(ROOT / path) if name.endswith((".py", ".png", ".json"))
        )
        return title + "".join(f"- [`{name}`]({path}/{name})\n" for name in names)
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{title}````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"
