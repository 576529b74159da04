"""The requests to a store, by fsspec: each of them ends, and all raise one kind of error."""

import base64
import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from flaxformer_mt.errors import UserError, first_line, requiring

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PUBLISHABLE = {*_EXTRAS, "file"}
"""Stores that refuse one of two writers that create the same object."""
_S3_OPTIONS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
_SECONDS, _BYTES_PER_SECOND = 90.0, 50_000
_CHUNK = 2**22
_MD5 = re.compile(r"[0-9a-f]{32}")
_MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class StoreError(UserError):
    """A request failed, or its answer was lost; it may have been carried out, or will be."""


class Object(NamedTuple):
    """An object: its name, its size, -1 if not known, and what else identifies its content."""

    key: str
    bytes: int
    version: str = ""
    md5: str = ""
    sha256: str = ""


class Content(NamedTuple):
    """Identifies the content of a file."""

    bytes: int
    sha256: str


def _request(method: _Method) -> _Method:
    """Makes a method end, after 90 s and the time for `size` bytes at 50 kB/s with `StoreError`."""

    @functools.wraps(method)
    def call(store: "Store", *given: Any, size: int = 0, **options: Any) -> Any:
        options |= {"size": size} if size else {}
        results: list[Any] = []
        errors: list[BaseException] = [TimeoutError("it does not answer")]

        def run() -> None:
            try:
                results.append(method(store, *given, **options))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(min(_SECONDS + size / _BYTES_PER_SECOND, threading.TIMEOUT_MAX))
        if results:
            return results[0]
        if isinstance(errors[-1], UserError):
            raise errors[-1]
        message = f"{store.url} cannot be used: {first_line(errors[-1])}"
        raise StoreError(message) from errors[-1]

    return cast(_Method, call)


class Store:
    """A folder of a store, or a single object, whose relative name is "".

    Methods raise `StoreError` if a request fails.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, _ = url.partition("://")
        self.is_publishable = scheme in _PUBLISHABLE
        self._has_folders = scheme == "file"
        extra = _EXTRAS.get(scheme)
        package = f"'flaxformer_mt[{extra}]'" if extra else "a file system of fsspec for it"
        # Others write to the store: what was listed before may have changed.
        options: dict[str, Any] = {"use_listings_cache": False}
        options |= {"config_kwargs": _S3_OPTIONS} if extra == "s3" else {}
        with requiring(url, "fsspec", "fsspec"):
            import fsspec
        try:
            with requiring(f"{scheme}://", package):
                self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ValueError as error:
            raise UserError(f"{self.url} cannot be used: {first_line(error)}") from error

    @_request
    def find(self) -> dict[str, Object]:
        """Returns all objects, by name; empty if there are none."""
        self._files.invalidate_cache()
        try:
            if self.url.startswith(("http://", "https://")):  # These have no folders.
                found = {self._root: self._files.info(self._root)}
            else:
                found = self._files.find(self._root, detail=True)
        except FileNotFoundError as error:
            # The client says this of servers that cannot be reached, too.
            if error.__cause__ and not isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            return {}
        names = {path: self._name(path) for path, info in found.items() if info["type"] == "file"}
        return {
            name: _object(name, found[path])
            for path, name in names.items()
            if found[path]["size"] or not path.endswith("/")  # It marks a folder.
        }

    @_request
    def names(self) -> set[str]:
        """Returns the names of objects and folders at the top; empty if there are none."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = {self._name(each["name"]): each for each in self._files.ls(self._root, True)}
            # An empty object of the folder's own name marks it.
            return {name for name, each in found.items() if name or each["size"]}
        return set()

    @_request
    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._files.cat_file(self._path(name)))
        return None

    @_request
    def create(self, name: str, content: bytes) -> bool:
        """Writes a small object; returns False, and writes nothing, if there is one."""
        try:
            self._files.pipe_file(self._new_path(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    @_request
    def get(self, name: str, local: Path, *, size: int = 0) -> bool:
        """Downloads an object of `size` bytes; returns False if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._files.get_file(self._path(name), str(local))
            return True
        return False

    @_request
    def put(self, name: str, file: BinaryIO, *, size: int = 0) -> Content:
        """Writes the first `size` bytes of a file to a new object; returns what was written."""
        digest, count = hashlib.sha256(), 0
        with self._files.open(self._new_path(name), "wb") as target:
            while chunk := file.read(min(size - count, _CHUNK)):
                digest.update(chunk)
                target.write(chunk)
                count += len(chunk)
        return Content(count, digest.hexdigest())

    @_request
    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    @_request
    def is_encrypted(self, name: str) -> bool:
        """Returns whether the ETag of an object of S3 is no MD5, since it has a key of the user."""
        if "s3" not in self._files.protocol:
            return False
        bucket, key, _ = self._files.split_path(self._path(name))
        head = self._files.call_s3("head_object", Bucket=bucket, Key=key)
        return "aws:kms" in head.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in head

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _new_path(self, name: str) -> str:
        path = self._path(name)
        if self._has_folders:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _name(self, path: str) -> str:
        return require_name(path[len(self._root) :].strip("/"), self.url)


def require_name(name: str, url: str) -> str:
    """Returns a relative name; raises `UserError` if it is no name of a file in a folder."""
    if ".." in PurePosixPath(name).parts or name.startswith("/") or "\0" in name:
        raise UserError(f"{url} has a file {name!r}, which is no name of a file here")
    return name


def _object(name: str, info: dict[str, Any]) -> Object:
    version = next((str(info[mark]) for mark in _MARKS if info.get(mark)), "")
    md5 = str(info.get("ETag", "")).strip('"')
    if info.get("md5Hash"):
        md5 = base64.b64decode(info["md5Hash"]).hex()
    size = -1 if info["size"] is None else int(info["size"])
    return Object(name, size, version, md5 if _MD5.fullmatch(md5) else "")
