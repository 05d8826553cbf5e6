"""Options that travel: validated once, where the user wrote them, and then the same in every process of a job."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheloader.errors import ConfigError
from cacheloader.quantity import parse_duration, parse_size

DAEMON_VARIABLE = "CACHELOADER_DAEMON"
CACHE_DIR_VARIABLE = "CACHELOADER_CACHE_DIR"
CACHE_SIZE_VARIABLE = "CACHELOADER_CACHE_SIZE"

EMBEDDED = "embedded"
"""``TransportOptions.daemon`` where no daemon was named: the first process of the node starts a private one."""

NO_DAEMON = "none"
"""``TransportOptions.daemon`` for reading straight from the origin."""

_SOCKET_SCHEME = "unix://"

_logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Where a private daemon keeps its cache if nobody said where.

    Returns:
        ``CACHELOADER_CACHE_DIR`` if set, else ``cacheloader`` below ``XDG_CACHE_HOME``, else ``~/.cache/cacheloader``.

    Raises:
        ConfigError: None of the two variables is set and the user has no home directory.
    """
    named = os.environ.get(CACHE_DIR_VARIABLE)
    if named:
        return _absolute(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):  # noqa: PTH117  (the specification says: a relative one is ignored)
        return Path(base, "cacheloader")
    try:
        return Path.home() / ".cache" / "cacheloader"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no home directory to keep the cache in ({error}); pass cache_dir= or set {CACHE_DIR_VARIABLE}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """How a process gets shards. What is not given is taken from the environment, at the moment of construction.

    Attributes:
        daemon: ``"unix:///path"`` of a shared daemon, ``"none"`` to read without one, ``"embedded"`` for a private
            one. Given as ``None``: ``CACHELOADER_DAEMON``, else embedded.
        cache_dir: Absolute path of the private daemon's cache. Given as ``None``: see ``default_cache_dir``.
        cache_size: What it may hold, in bytes; ``None`` leaves the choice to the process that starts the daemon. Given
            as ``None``: ``CACHELOADER_CACHE_SIZE``.
        timeout_s: Longest wait for one shard, and for one sign of life while a data set is resolved; above 0.
        hello_timeout_s: Longest wait for a daemon's sign of life, above 0: for the answer to a new connection, and
            between two messages while a shard is waited for. A daemon that is silent for longer hangs; then this
            process reads straight from the origin until it wakes up.
        launch_timeout_s: Longest wait for a private daemon to start, recovery of its cache included; above 0.
        fallback_after_s: How long to wait for a lost daemon before reading straight from the origin; 0 or more.
        idle_timeout_s: A private daemon leaves when nobody was connected for so long; above 0.
        direct_memory: What the helper process that reads without a daemon may hold ready in memory beside the shards
            that are leased, in bytes or as text. The processes of a user on a node share one helper, where they can.

    Raises:
        ConfigError: A value, given or from the environment, cannot work.
    """

    daemon: str | None = None
    cache_dir: str | Path | None = None
    cache_size: int | str | None = None
    timeout_s: float = 300.0
    hello_timeout_s: float = 10.0
    launch_timeout_s: float = 60.0
    fallback_after_s: float = 2.0
    idle_timeout_s: float = 60.0
    direct_memory: int | str = "256MiB"

    def __post_init__(self) -> None:
        daemon = _daemon(self.daemon)
        if daemon.startswith(_SOCKET_SCHEME) and (self.cache_dir is not None or self.cache_size is not None):
            _logger.warning(
                "cache_dir=%r and cache_size=%r have no effect: the daemon at %s has a cache of its own",
                self.cache_dir,
                self.cache_size,
                daemon,
            )
        _settle(self, "daemon", daemon)
        _settle(self, "cache_dir", str(_absolute(self.cache_dir) if self.cache_dir else _default_dir(daemon)))
        _settle(self, "cache_size", _cache_size(self.cache_size))
        _settle(self, "direct_memory", parse_size(self.direct_memory, name="direct_memory"))
        for name in ("timeout_s", "hello_timeout_s", "launch_timeout_s", "idle_timeout_s"):
            seconds = parse_duration(getattr(self, name), name=name)
            if seconds == 0 or not math.isfinite(seconds):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not above 0; pass seconds")
            _settle(self, name, seconds)
        _settle(self, "fallback_after_s", parse_duration(self.fallback_after_s, name="fallback_after_s"))

    @property
    def directory(self) -> Path:
        """The private daemon's cache directory."""
        return Path(str(self.cache_dir))

    @property
    def cache_size_bytes(self) -> int | None:
        """What the private daemon's cache may hold, ``None`` if nobody said."""
        return None if self.cache_size is None else int(self.cache_size)

    @property
    def direct_memory_bytes(self) -> int:
        """What may be held ready in memory where there is no daemon."""
        return int(self.direct_memory)

    @property
    def socket_path(self) -> Path | None:
        """The shared daemon's socket, ``None`` without a shared daemon."""
        daemon = str(self.daemon)
        return Path(daemon.removeprefix(_SOCKET_SCHEME)) if daemon.startswith(_SOCKET_SCHEME) else None


def parse_storage_options(text: str | None) -> dict[str, Any]:
    """Options of a store as a command line takes them: a JSON object, named as fsspec names them.

    Raises:
        ConfigError: It is none.
    """
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--storage-options is no JSON object ({error}); pass one in single quotes, such as "
            '\'{"key": "…", "secret": "…"}\''
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"--storage-options={text!r} is no JSON object; pass {{…}}")
    return found


def _daemon(given: str | None) -> str:
    daemon = given if given is not None else os.environ.get(DAEMON_VARIABLE) or EMBEDDED
    if daemon in (EMBEDDED, NO_DAEMON) or daemon.startswith(f"{_SOCKET_SCHEME}/"):
        return daemon
    source = "daemon" if given is not None else DAEMON_VARIABLE
    raise ConfigError(
        f'{source}={daemon!r} names no daemon; pass "unix:///absolute/path" of a daemon\'s socket, '
        f'"{NO_DAEMON}" to read without one, or leave it out for a private one'
    )


def _default_dir(daemon: str) -> Path:
    try:
        return default_cache_dir()
    except ConfigError:
        if daemon == EMBEDDED:
            raise
        # Only manifests are kept there, named by their digests: any place will do, and none is needed.
        import tempfile

        return Path(tempfile.gettempdir(), f"cacheloader-{os.getuid()}")


def _cache_size(given: int | str | None) -> int | None:
    text = given if given is not None else os.environ.get(CACHE_SIZE_VARIABLE) or None
    if text is None:
        return None
    name = "cache_size" if given is not None else CACHE_SIZE_VARIABLE
    size_bytes = parse_size(text, name=name)
    if size_bytes == 0:
        raise ConfigError(f'{name}={text!r} leaves no room; pass daemon="{NO_DAEMON}" to read without a cache')
    return size_bytes


def _absolute(path: str | Path) -> Path:
    # A worker, or the daemon, may run in another directory.
    return Path(path).expanduser().absolute()


def _settle(options: TransportOptions, name: str, value: object) -> None:
    object.__setattr__(options, name, value)
