"""Names of remote files and folders, and the access to them by fsspec."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from flaxformer_mt.errors import UserError, first_line, requiring

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_OF_OBJECTS = {*_EXTRAS, "abfs", "abfss", "adl", "az"}
"""Have no folders, and would make a bucket in place of one."""
_READ_ONLY = {"http", "https"}


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Returns "gs://bucket/run" for such a path, None for a local one.

    `Path("gs://bucket/run")`, which pathlib prints with one slash, is such a path, too. If there is
    a folder "gs:", it is a local one.
    """
    path = Path(path)
    for folder in (path, *path.parents):
        if _SCHEME.fullmatch(folder.name) and not folder.is_dir():
            root = "/" if folder.name == "file:" else ""
            return f"{folder.name}//{root}{path.relative_to(folder)}"
    return None


def require_local(path: str | os.PathLike[str]) -> None:
    """Raises `UserError` for a remote path where only a local one can be used."""
    if url := url_of(path):
        raise UserError(
            f"{url} is a remote path, and only local ones are supported here: mount it (gcsfuse, "
            "mount-s3), and name the local folder"
        )


class Store:
    """A remote file, or folder with all its files, whose names are relative; "" is the file itself.

    All methods raise `UserError` if the store cannot be used.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, _ = url.partition("://")
        with requiring(url, "fsspec", "fsspec"):
            import fsspec
        extra = _EXTRAS.get(scheme)
        package = f"'flaxformer_mt[{extra}]'" if extra else "a file system of fsspec for it"
        with requiring(f"{scheme}://", package), self._explained():
            # Others write to the store: what was listed before may have changed.
            self._files, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        self._has_folders = scheme not in _OF_OBJECTS
        self.is_read_only = scheme in _READ_ONLY

    def list(self) -> dict[str, tuple[str, int]]:
        """Returns the version and the size of each file; empty if there is nothing."""
        with self._explained():
            self._files.invalidate_cache()
            found = self._files.find(self._root, detail=True)
        files = {}
        for path, info in found.items():
            name = path[len(self._root) :].strip("/")
            if info["type"] != "file" or (path.endswith("/") and not info["size"]):
                continue  # An empty object may mark a folder.
            if ".." in PurePosixPath(name).parts:
                raise UserError(f"{self.url} has a file {name!r}, which is no name of a file here")
            marks = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
            version = next((str(info[mark]) for mark in marks if info.get(mark)), "")
            files[name] = version, int(info["size"] or 0)
        return files

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file; None if there is none."""
        with self._explained():
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes, is_new: bool = False) -> bool:
        """Writes a small file; returns False if `is_new` and another process has made it."""
        path, mode = self._path(name), "create" if is_new else "overwrite"
        with self._explained():
            try:
                self._with_parents(path, lambda: self._files.pipe_file(path, content, mode=mode))
            except FileExistsError:
                return False
        return True

    def get(self, name: str, local: Path) -> bool:
        """Downloads a file; returns False if there is none."""
        with self._explained():
            try:
                self._files.get_file(self._path(name), str(local))
            except FileNotFoundError:
                return False
        return True

    def put(self, name: str, local: Path) -> bool:
        """Uploads a file; returns False if it has been removed in the meantime."""
        path = self._path(name)
        with self._explained():
            try:
                self._with_parents(path, lambda: self._files.put_file(str(local), path))
            except FileNotFoundError:
                if local.exists():
                    raise
                return False
        return True

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._explained(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _with_parents(self, path: str, write: Callable[[], object]) -> None:
        """Calls a function that writes a file, after making its folder where there are such."""
        try:
            write()
        except FileNotFoundError:
            if not self._has_folders:
                raise
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Converts the errors of file systems, each of which has its own exceptions."""
        try:
            yield
        except (ImportError, UserError):
            raise
        except Exception as error:
            raise UserError(f"{self.url} cannot be used: {first_line(error)}") from error
