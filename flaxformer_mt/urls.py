"""URLs of object stores, such as s3://bucket/run, among the paths that users give."""

import os
import re
from pathlib import Path

from flaxformer_mt.errors import UserError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Returns "gs://bucket/run" for such a path, None for a local one.

    `Path("gs://bucket/run")`, which pathlib prints with one slash, is a URL, too. If there is a
    folder "gs:", the path is local.
    """
    path = Path(path)
    for folder in (path, *path.parents):
        if _SCHEME.fullmatch(folder.name) and not folder.is_dir():
            root = "/" if folder.name == "file:" else ""
            return f"{folder.name}//{root}{path.relative_to(folder)}"
    return None


def require_local(path: str | os.PathLike[str]) -> None:
    """Raises `UserError` for a URL where a local path is needed: everything that is written."""
    if url := url_of(path):
        raise UserError(
            f"{url} cannot be written to: give a local path. To publish a run there, give train "
            f"publish={url}, or run `flaxformer-mt publish RUN {url}`; commands read from URLs"
        )
