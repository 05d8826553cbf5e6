"""Which engine reads a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError
from cacheloader.origin.environment import effective_environment
from cacheloader.origin.location import scheme_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheloader.origin.base import Origin

ENGINES = ("auto", "obstore", "fsspec", "mount")

_WEB = {"http", "https"}


def open_origin(
    url: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    engine: str = "auto",
) -> Origin:
    """The origin of ``url``'s store (bucket, host, or all mounted volumes). Nothing is asked until it is used.

    Args:
        url: Any canonical URL of the store.
        storage_options: Named as the scheme's fsspec file system names them; ``"engine"`` among them overrides
            ``engine``.
        environment: The client's store variables, which replace this process's; ``None`` keeps the latter.
        engine: ``"auto"`` takes ``"obstore"`` for s3, gs, az, abfs, http and https, ``"mount"`` for paths, and
            ``"fsspec"`` for all else and for web URLs with a query.

    Raises:
        ConfigError: The engine or an option is unknown, or the engine cannot read such URLs.
    """
    options = dict(storage_options or {})
    engine = str(options.pop("engine", engine))
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is unknown; it is one of {', '.join(ENGINES)}")
    scheme = scheme_of(url)
    variables = effective_environment(environment)
    if engine == "mount" or (engine == "auto" and scheme == "file"):
        return _mount(url, options)
    # Imported late: a job on a mounted volume needs none of the engines.
    from cacheloader.origin.object_store import BUILDERS, ObjectStoreOrigin

    if engine == "obstore" or (engine == "auto" and scheme in BUILDERS and not _signed(url)):
        if scheme not in BUILDERS:
            raise ConfigError(f"the engine obstore cannot read {url}; it reads {', '.join(BUILDERS)}")
        return ObjectStoreOrigin(url, options=options, environment=variables)
    return _filesystem(url, options, variables)


def _mount(url: str, options: Mapping[str, object]) -> Origin:
    from cacheloader.origin.mount import MountOrigin

    if scheme_of(url) != "file":
        raise ConfigError(f"the engine mount cannot read {url}; it reads paths and file:// URLs")
    if options:
        raise ConfigError(f"storage_options {', '.join(sorted(options))} have no meaning for {url}; leave them out")
    return MountOrigin()


def _filesystem(url: str, options: Mapping[str, object], variables: Mapping[str, str]) -> Origin:
    from cacheloader.origin.conditional import S3FilesystemOrigin, WebFilesystemOrigin
    from cacheloader.origin.filesystem import FilesystemOrigin

    scheme = scheme_of(url)
    if scheme == "s3":
        return S3FilesystemOrigin(url, options=options, environment=variables)
    if scheme in _WEB:
        return WebFilesystemOrigin(url, options=options)
    return FilesystemOrigin(url, options=options)


def _signed(url: str) -> bool:
    return scheme_of(url) in _WEB and "?" in url
