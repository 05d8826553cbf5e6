"""Where a run's event files can lie: below a folder, or in a store that fsspec reaches."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PATTERN = "events-*.jsonl"


class Place(Protocol):
    """Event files below one root."""

    @property
    def name(self) -> str:
        """The last part of the root: the run's name."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by its path, as they are now."""
        ...

    def reading(self, path: str) -> IO[bytes]:
        """A seekable stream of one of them."""
        ...


class Folder:
    """A local folder, with all below it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        """See ``Place``."""
        return self._path.resolve().name

    def sizes(self) -> dict[str, int]:
        """See ``Place``."""
        return {str(path): path.stat().st_size for path in sorted(self._path.rglob(PATTERN))}

    def reading(self, path: str) -> IO[bytes]:
        """See ``Place``."""
        return Path(path).open("rb")


class Bucket:
    """A prefix of an object store, or another file system of fsspec.

    Args:
        url: Of the prefix.
        options: What the file system takes beside what the environment says.

    Raises:
        ConfigError: fsspec cannot open it.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        from fsspec.core import url_to_fs

        self._url = url.rstrip("/")
        given = {"use_listings_cache": False, **(options or {})}
        try:
            self._fs, self._root = url_to_fs(self._url, **given)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"no goodput events can be read from {url} ({error}); pass a folder or a URL that fsspec knows") from error  # noqa: E501  # fmt: skip

    def __str__(self) -> str:
        return self._url

    @property
    def name(self) -> str:
        """See ``Place``."""
        return self._url.rpartition("/")[2]

    def sizes(self) -> dict[str, int]:
        """See ``Place``."""
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self._url} cannot be listed ({error}); check the URL and the credentials") from error
        paths = [path for path in sorted(found) if Path(path).match(PATTERN)]
        return {path: int(found[path].get("size") or 0) for path in paths}

    def reading(self, path: str) -> IO[bytes]:
        """See ``Place``."""
        return cast("IO[bytes]", self._fs.open(path, "rb"))

    def put(self, path: Path) -> None:
        """Copy a local file here, under its name.

        Raises:
            Exception: Whatever the file system raises.
        """
        if "s3" not in self._fs.protocol:  # a bucket has no folders, and asking for one costs rights
            self._fs.makedirs(self._root, exist_ok=True)
        self._fs.put_file(str(path), f"{self._root}/{path.name}")


def place(where: str | Path) -> Place:
    """A path, or a URL."""
    return Bucket(str(where)) if "://" in str(where) else Folder(Path(where))
