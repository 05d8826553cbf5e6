"""The daemon's options: one frozen record, checked when it is made, from a TOML file or from flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cacheloader.errors import ConfigError
from cacheloader.quantity import format_size, parse_size
from cacheloader_daemon.priority import Priority
from cacheloader_daemon.room import Floors
from cacheloader_daemon.tenants import Tenant

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIVATE_IDLE_TIMEOUT_S = 60.0
SOCKET_NAME = "daemon.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """How one daemon runs.

    Attributes:
        cache_dir: Directory of the cache; it belongs to the daemon and is made if it is missing.
        cache_dirs: Directories on several disks that make one cache, instead of ``cache_dir``, which is then the first
            of them; for a shared daemon.
        cache_size: Bytes the cache may hold, or text such as ``"200GiB"``; "" means 75 % of what the file systems have
            free above the floors (with what the cache already holds). Several directories share it by the room that
            they have.
        min_free_size: Bytes that the cache leaves free on each of its disks, whoever else fills them.
        min_free_share: Part of each disk, and of its inodes, that the cache leaves free; the larger of both counts.
        verify_on_lease: Whether a shard is compared with its checksum each time that it is handed out, and not only
            after power has failed. Costs a pass over its bytes.
        scrub_interval_s: Time in which every shard in the cache is read once and compared with its checksum; 0 means
            never. A week is gentle: 12 MB/s for 7 TB.
        scrub_rate: Bytes a second at which a shard is read for that.
        socket: Where clients connect; ``daemon.sock`` in ``cache_dir`` if not given.
        private: Started by one user's training process, for that user alone: ``Stop`` is obeyed, and the daemon
            leaves when it is idle.
        idle_timeout_s: Seconds without a connection after which the daemon leaves; 0 means never. Not given: 60 for
            a private daemon, never for a shared one.
        metrics_port: Loopback port of ``/metrics`` and ``/healthz``; 0 means none.
        allowed_uids: Users that may connect besides the daemon's own.
        allowed_gids: Groups whose members may connect.
        look_up_groups: Whether a client's groups are also those that the system's database names for his user, and not
            those of his process alone. For processes that are started with their main group only.
        allow_all_users: Whether everybody may connect who can open the socket.
        allow_local_paths: Whether clients of a shared daemon may name files of this node, which are read with the
            daemon's rights and not with theirs, among URLs and among storage options. A private daemon always may.
        allow_profiles: Whether clients of a shared daemon may choose a profile from the daemon's own AWS configuration.
        allowed_endpoints: Stores (`http://minio.example:9000`) to which clients of a shared daemon may lead its own
            credentials by a storage option. With credentials of their own they may name any.
        tenants: Shares of a shared daemon: who may read what, and take how much (see ``Tenant``). Their users and
            groups may connect. Where there are tenants, who belongs to none reads nothing.
        allowed_schemes: Schemes of URLs that clients of a shared daemon may use besides s3, gs, az, abfs, http and
            https. fsspec reads them; those that wrap other file systems or read this node's files give its clients
            the daemon's rights.
        socket_mode: Permission bits of the socket file.
        max_connections: Clients at once; a node with 8 ranks of 16 workers needs 136.
        max_requests: Unanswered requests of one client.
        max_messages_per_s: Messages a second that are read from one connection; 0 means no limit. What comes faster
            waits unread.
        eviction: ``"plan"``; ``"lru"`` ignores what jobs say they will read, fetches nothing ahead and gives up the
            shard used longest ago. It is there to compare with.
        max_fetches: Shards fetched at once.
        max_range_requests: Range requests to origins in flight at once.
        max_origin_requests_per_s: Range requests to origins begun in a second; 0 means no limit.
        max_bandwidth: Bytes a second asked of origins; "" means no limit.
        hedge_share: Range requests that may be asked a second time because they are late, as a share of all; 0 for
            never.
        range_size: Bytes of one range request.
        max_transfer_size: Bytes asked of origins and not yet written to disk; bounds the daemon's memory.
        max_memory_size: Bytes of shards that may be served from memory at once, where the cache cannot take them (its
            disk is full or broken, or others hold its space); "" means a quarter of the node's memory.
        prepare_processes: Processes that index shards, at most.
        nice: Added to the process's niceness.
        drop_behind: Whether pages of a shard leave memory once nobody reads it, so that the page cache is left to the
            job; a shard that is read again soon is then read from disk. Unwritten pages are kept few while it arrives.
        io_class: Priority at the disk: "idle" or "best-effort"; "" leaves it.
        cpus: Processors that the daemon may use, such as "0-3,8"; "" means all.
        log_level: Name of a logging level.
    """

    cache_dir: Path
    cache_dirs: tuple[Path, ...] = ()
    cache_size: int | str = ""
    min_free_size: int | str = 0
    min_free_share: float = 0.01
    verify_on_lease: bool = False
    scrub_interval_s: float = 0.0
    scrub_rate: int | str = "64MiB"
    socket: Path | None = None
    private: bool = False
    idle_timeout_s: float | None = None
    metrics_port: int = 0
    allowed_uids: tuple[int, ...] = ()
    allowed_gids: tuple[int, ...] = ()
    look_up_groups: bool = False
    allow_all_users: bool = False
    allow_local_paths: bool = False
    allow_profiles: bool = False
    allowed_schemes: tuple[str, ...] = ()
    allowed_endpoints: tuple[str, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    socket_mode: int = 0o600
    max_connections: int = 1024
    max_requests: int = 256
    max_messages_per_s: int = 0
    eviction: str = "plan"
    max_fetches: int = 16
    max_range_requests: int = 32
    max_origin_requests_per_s: int = 0
    max_bandwidth: int | str = ""
    hedge_share: float = 0.05
    range_size: int | str = "8MiB"
    max_transfer_size: int | str = "256MiB"
    max_memory_size: int | str = ""
    prepare_processes: int = 2
    nice: int = 0
    drop_behind: bool = False
    io_class: str = ""
    cpus: str = ""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if self.cache_bytes == 0:
            raise ConfigError(f"cache_size={self.cache_size!r} leaves no room; pass bytes, or leave it out")
        self._check_directories()
        if self.scrub_bytes_per_s < 2**20:
            raise ConfigError(f"scrub_rate={self.scrub_rate!r} is below 1MiB; pass at least that a second")
        if not 0 <= self.scrub_interval_s < float("inf"):
            raise ConfigError(f"scrub_interval_s={self.scrub_interval_s} is no number of seconds; pass 0 for never")
        if self.range_bytes < 2**16:
            raise ConfigError(f"range_size={self.range_size!r} is below 64KiB; pass at least that")
        if self.max_transfer_bytes < self.range_bytes:
            raise ConfigError(
                f"max_transfer_size={self.max_transfer_size!r} is below range_size={self.range_size!r}; not one range "
                "would fit"
            )
        if self.max_memory_size != "":
            parse_size(self.max_memory_size, name="max_memory_size")
        for name, smallest, largest in (
            ("metrics_port", 0, 65535),
            ("socket_mode", 0, 0o777),
            ("max_connections", 1, 10**6),
            ("max_requests", 1, 10**5),
            ("max_messages_per_s", 0, 10**9),
            ("max_origin_requests_per_s", 0, 10**9),
            ("max_fetches", 1, 1024),
            ("max_range_requests", 1, 4096),
            ("prepare_processes", 1, 64),
        ):
            value = getattr(self, name)
            if not smallest <= value <= largest:
                raise ConfigError(f"{name}={value} is not between {smallest} and {largest}")
        if not 0 <= self.hedge_share <= 1:
            raise ConfigError(f"hedge_share={self.hedge_share} is not between 0 (never) and 1")
        if self.idle_timeout_s is not None and not 0 <= self.idle_timeout_s < float("inf"):
            raise ConfigError(f"idle_timeout_s={self.idle_timeout_s} is no number of seconds; pass 0 for never")
        if self.private and (
            self.allowed_uids or self.allowed_gids or self.allow_all_users or self.look_up_groups or self.tenants
        ):
            raise ConfigError(
                "allowed_uids, allowed_gids, allow_all_users, look_up_groups and tenants are for a shared daemon; a "
                "private one serves its own user"
            )
        self._check_tenants()
        _ = self.priority, self.max_bytes_per_s
        if self.eviction not in {"plan", "lru"}:
            raise ConfigError(f"eviction={self.eviction!r} is none of plan, lru")
        if self.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise ConfigError(f"log_level={self.log_level!r} is none of DEBUG, INFO, WARNING, ERROR")

    def _check_directories(self) -> None:
        if not self.cache_dirs:
            object.__setattr__(self, "cache_dirs", (self.cache_dir,))
        if self.cache_dirs[0] != self.cache_dir or len(set(self.cache_dirs)) < len(self.cache_dirs):
            raise ConfigError(
                f"cache_dirs={[str(path) for path in self.cache_dirs]} names a directory twice, or does not begin with "
                f"cache_dir={str(self.cache_dir)!r}; name each once, and give cache_dirs alone"
            )
        if self.private and len(self.cache_dirs) > 1:
            raise ConfigError("cache_dirs is for a shared daemon; a private one has its one cache_dir")
        _ = self.floors

    def _check_tenants(self) -> None:
        names = [tenant.name for tenant in self.tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two tenants are named {twice[0]!r}; give each a name of its own")
        guaranteed_bytes = sum(tenant.guaranteed_bytes for tenant in self.tenants)
        if self.cache_bytes is not None and guaranteed_bytes > self.cache_bytes:
            raise ConfigError(
                f"the tenants are guaranteed {format_size(guaranteed_bytes)} (guaranteed_size) together, which is more "
                f"than cache_size={self.cache_size!r}; promise less, or make the cache larger"
            )

    @property
    def priority(self) -> Priority:
        """How the daemon gives way to others."""
        return Priority.parse(nice=self.nice, io_class=self.io_class, cpus=self.cpus)

    @property
    def max_bytes_per_s(self) -> int:
        """Bytes a second asked of origins; 0 means no limit."""
        return 0 if self.max_bandwidth == "" else parse_size(self.max_bandwidth, name="max_bandwidth")

    @property
    def cache_bytes(self) -> int | None:
        """Bytes the cache may hold; ``None`` for a part of what its disks have free."""
        return None if self.cache_size == "" else parse_size(self.cache_size, name="cache_size")

    @property
    def floors(self) -> Floors:
        """What the cache leaves free for others."""
        return Floors(
            min_free_bytes=parse_size(self.min_free_size, name="min_free_size"), min_free_share=self.min_free_share
        )

    @property
    def scrub_bytes_per_s(self) -> int:
        """Bytes a second at which a shard is read to find damage."""
        return parse_size(self.scrub_rate, name="scrub_rate")

    @property
    def range_bytes(self) -> int:
        """Bytes of one range request."""
        return parse_size(self.range_size, name="range_size")

    @property
    def max_transfer_bytes(self) -> int:
        """Bytes asked of origins and not yet written to disk."""
        return parse_size(self.max_transfer_size, name="max_transfer_size")

    @property
    def max_memory_bytes(self) -> int:
        """Bytes of shards that may be served from memory at once."""
        if self.max_memory_size != "":
            return parse_size(self.max_memory_size, name="max_memory_size")
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4

    @property
    def socket_path(self) -> Path:
        """Where clients connect."""
        return self.socket if self.socket is not None else self.cache_dir / SOCKET_NAME

    @property
    def idle_exit_s(self) -> float:
        """Seconds without a connection after which the daemon leaves; 0 means never."""
        if self.idle_timeout_s is not None:
            return self.idle_timeout_s
        return PRIVATE_IDLE_TIMEOUT_S if self.private else 0.0

    @classmethod
    def from_mapping(cls, options: Mapping[str, object], *, source: str) -> Self:
        """A configuration from named values.

        Args:
            options: Values named like the attributes.
            source: Where they come from, for errors.

        Raises:
            ConfigError: A name is unknown, a value has another type, or a rule is broken.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"{source} has the unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
            )
        values = {name: _converted(name, value, source) for name, value in options.items()}
        if values.get("cache_dirs"):
            if "cache_dir" in values:
                raise ConfigError(f"{source} names both cache_dir and cache_dirs; give one of them")
            values["cache_dir"] = values["cache_dirs"][0]
        if "cache_dir" not in values:
            raise ConfigError(f"{source} names no cache_dir; give the directory that the cache may use")
        return cls(**values)

    @staticmethod
    def read(path: Path) -> dict[str, object]:
        """The named values in the TOML file ``path``, unchecked.

        Raises:
            ConfigError: It cannot be read or is no TOML.
        """
        import tomllib

        try:
            with path.open("rb") as file:
                return tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration {path} is no TOML: {error}") from error


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

_TYPES: dict[str, tuple[type, ...]] = {
    "cache_dir": (str, Path),
    "cache_dirs": (list, tuple),
    "cache_size": (int, str),
    "min_free_size": (int, str),
    "min_free_share": (int, float),
    "verify_on_lease": (bool,),
    "scrub_interval_s": (int, float),
    "scrub_rate": (int, str),
    "socket": (str, Path),
    "private": (bool,),
    "look_up_groups": (bool,),
    "allow_all_users": (bool,),
    "allow_local_paths": (bool,),
    "allow_profiles": (bool,),
    "allowed_schemes": (list, tuple),
    "allowed_endpoints": (list, tuple),
    "tenants": (list, tuple),
    "max_bandwidth": (int, str),
    "drop_behind": (bool,),
    "io_class": (str,),
    "cpus": (str,),
    "idle_timeout_s": (int, float),
    "allowed_uids": (list, tuple),
    "allowed_gids": (list, tuple),
    "range_size": (int, str),
    "max_transfer_size": (int, str),
    "max_memory_size": (int, str),
    "log_level": (str,),
    "eviction": (str,),
    "hedge_share": (int, float),
}


def _converted(name: str, value: object, source: str) -> Any:
    types = _TYPES.get(name, (int,))
    # A bool is an int to Python, and a mistake to a reader of the file.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(kind.__name__ for kind in types if kind not in {Path, tuple})
        raise ConfigError(f"{source}: {name}={value!r} is no {expected}")
    if name in {"cache_dir", "socket"}:
        return Path(str(value)).expanduser().absolute()
    if name == "cache_dirs":
        paths = list(value) if isinstance(value, list | tuple) else []
        if not paths or not all(isinstance(path, str | Path) and str(path) for path in paths):
            raise ConfigError(f'{source}: cache_dirs={value!r} is no list of directories such as ["/nvme0/cache"]')
        return tuple(Path(str(path)).expanduser().absolute() for path in paths)
    if name in {"allowed_uids", "allowed_gids"}:
        ids = list(value) if isinstance(value, list | tuple) else []
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in ids):
            raise ConfigError(f"{source}: {name}={value!r} is no list of numbers; names are not looked up")
        return tuple(ids)
    if name == "allowed_schemes":
        schemes = list(value) if isinstance(value, list | tuple) else []
        if not all(isinstance(scheme, str) and _SCHEME.fullmatch(scheme) for scheme in schemes):
            raise ConfigError(f'{source}: {name}={value!r} is no list of schemes such as "hf"')
        return tuple(schemes)
    if name == "allowed_endpoints":
        endpoints = list(value) if isinstance(value, list | tuple) else []
        if not all(isinstance(endpoint, str) and "://" in endpoint for endpoint in endpoints):
            raise ConfigError(f'{source}: {name}={value!r} is no list of endpoints such as "https://minio.example"')
        return tuple(endpoint.rstrip("/") for endpoint in endpoints)
    if name == "tenants":
        tables = list(value) if isinstance(value, list | tuple) else []
        if not all(isinstance(table, dict) for table in tables):
            raise ConfigError(f"{source}: tenants={value!r} is no list of tables; write each as [[tenants]]")
        return tuple(Tenant.from_mapping(table, source=source) for table in tables)
    return value
