"""Where checkpoints lie: a folder, or anything that fsspec reaches. A file appears there only once it is complete."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PARTIAL = ".part"
"""Ends the name of a file that is being written; no reader looks at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file as a store sees it.

    Attributes:
        size_bytes: Its length.
        modified_s: When it was written, in seconds since 1970; ``None`` where the store does not say.
    """

    size_bytes: int
    modified_s: float | None = None


class Store(Protocol):
    """A tree of files below one root; paths are relative to it and use ``/``."""

    def top(self) -> dict[str, bool]:
        """Names right below the root, and whether each is a folder; empty if there is no root yet."""
        ...

    def files(self, folder: str) -> dict[str, File]:
        """Every file below ``folder`` by its path relative to it, as the store sees it now; a file itself as ``""``."""
        ...

    def reading(self, path: str) -> IO[bytes]:
        """A seekable stream of a file.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def writing(self, path: str) -> Any:
        """A context whose stream becomes the file when it is left without an error, and nothing otherwise."""
        ...

    def remove(self, folder: str, *, first: Sequence[str] = ()) -> None:
        """Delete a folder with all that is in it, or a file; ``first`` names files that have to go before others."""
        ...


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store of a path or URL.

    Args:
        url: A path, ``file://…``, or a URL that fsspec knows.
        storage_options: What fsspec's file system of that URL takes.

    Raises:
        ConfigError: The URL names no file system that is installed.
    """
    text = os.fspath(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text and "::" not in text:
        return FolderStore(text)
    store = FsspecStore(text, storage_options or {})
    try:
        store.filesystem()
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"checkpoints cannot lie at {text} ({error}); pass a path, or a URL of a file system that fsspec has"
        ) from error
    return store


class FolderStore:
    """A local or mounted folder."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).expanduser().absolute()

    def __str__(self) -> str:
        return str(self._root)

    def top(self) -> dict[str, bool]:
        """Names right below the root."""
        try:
            return {entry.name: entry.is_dir() for entry in os.scandir(self._root)}
        except FileNotFoundError:
            return {}

    def files(self, folder: str) -> dict[str, File]:
        """Every file below ``folder``."""
        base = self._root / folder
        if base.is_file():
            return {"": self._file(base)}
        found = {}
        for directory, _, names in os.walk(base):
            for name in names:
                path = Path(directory, name)
                try:
                    found[path.relative_to(base).as_posix()] = self._file(path)
                except FileNotFoundError:  # removed meanwhile
                    continue
        return found

    @staticmethod
    def _file(path: Path) -> File:
        status = path.stat()
        return File(size_bytes=status.st_size, modified_s=status.st_mtime)

    def reading(self, path: str) -> IO[bytes]:
        """A stream of a file."""
        return (self._root / path).open("rb")

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """Write beside the place, make it durable, then rename."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.with_name(target.name + PARTIAL)
        try:
            with half.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            half.replace(target)
        except BaseException:
            half.unlink(missing_ok=True)
            raise
        self._sync(target.parent)

    def remove(self, folder: str, *, first: Sequence[str] = ()) -> None:
        """Delete a folder or a file."""
        base = self._root / folder
        if base.is_symlink():  # what it points to lies elsewhere and is not ours
            base.unlink()
            return
        for name in first:
            (base / name).unlink(missing_ok=True)
        if base.is_file():
            base.unlink()
        elif base.exists():
            self._sync(base)  # what goes first is gone for good before the rest goes
            shutil.rmtree(base)

    @staticmethod
    def _sync(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FsspecStore:
    """An object store, or another file system, through fsspec. Travels to other processes without its connections."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._options = dict(storage_options)
        self._filesystem: Any = None
        self._root = ""

    def __str__(self) -> str:
        return self._url

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_filesystem": None}

    def filesystem(self) -> Any:
        """The file system, opened on first use: it must not be inherited by a forked process."""
        if self._filesystem is None:
            from fsspec.core import url_to_fs

            options = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
            if self._url.startswith(("s3://", "s3a://")):
                # A store that went away is noticed in about a minute, not after botocore's five.
                options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 30} | options.get(
                    "config_kwargs", {}
                )
            self._filesystem, root = url_to_fs(self._url, **options)
            self._root = root.rstrip("/")
        return self._filesystem

    def top(self) -> dict[str, bool]:
        """Names right below the root."""
        files = self.filesystem()
        files.invalidate_cache()
        try:
            entries = files.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["name"].rstrip("/") != self._root:  # some stores list a folder's own marker
                found[name] = entry["type"] == "directory"
        return found

    def files(self, folder: str) -> dict[str, File]:
        """Every file below ``folder``."""
        files = self.filesystem()
        files.invalidate_cache()
        base = f"{self._root}/{folder}"
        found = {}
        for name, entry in files.find(base, detail=True).items():
            if entry["type"] == "file" and not name.endswith("/"):
                found[name[len(base) :].lstrip("/")] = File(
                    size_bytes=int(entry["size"]), modified_s=_modified_s(entry)
                )
        return found

    def reading(self, path: str) -> IO[bytes]:
        """A stream of a file."""
        files = self.filesystem()
        files.invalidate_cache()
        stream: IO[bytes] = files.open(f"{self._root}/{path}", "rb")
        return stream

    @contextmanager
    def writing(self, path: str) -> Iterator[IO[bytes]]:
        """Upload; an error on the way discards what was sent.

        fsspec's own ``with`` closes the stream on an error, which publishes the first part of the file as the whole.
        """
        files = self.filesystem()
        place = f"{self._root}/{path}"
        parent = place.rpartition("/")[0]
        if not files.protocol or "s3" not in files.protocol:
            files.makedirs(parent, exist_ok=True)
        stream = files.open(place, "wb")
        try:
            yield stream
        except BaseException:
            with suppress(Exception):  # the store may be what failed
                self._discard(stream, place)
            raise
        stream.close()

    def _discard(self, stream: Any, place: str) -> None:
        try:
            stream.discard()
            stream.closed = True  # so that nobody, not even its destructor, closes and thereby publishes it
        except AttributeError:  # no upload of several parts: what was written is there already
            stream.close()
            self.filesystem().rm_file(place)

    def remove(self, folder: str, *, first: Sequence[str] = ()) -> None:
        """Delete a folder or a file."""
        files = self.filesystem()
        base = f"{self._root}/{folder}"
        files.invalidate_cache()
        for name in first:
            if files.exists(f"{base}/{name}"):
                files.rm_file(f"{base}/{name}")
        files.invalidate_cache()
        if files.exists(base):
            folders = [base, *files.find(base, withdirs=True, detail=True)]
            files.rm(base, recursive=True)
            if "s3" in files.protocol:
                for place in sorted(folders, key=len, reverse=True):  # some servers go on listing an emptied folder
                    bucket, _, key = place.partition("/")
                    files.call_s3("delete_object", Bucket=bucket, Key=f"{key}/")
        files.invalidate_cache()


def _modified_s(entry: Mapping[str, Any]) -> float | None:
    """When a file was written; each of fsspec's file systems has a name of its own for it."""
    for key in ("LastModified", "mtime", "last_modified", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
