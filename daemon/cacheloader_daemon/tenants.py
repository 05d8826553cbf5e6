"""Who shares a daemon: users and groups, what each may read, and how much of the node each may take.

A tenant is a share of the daemon, held by all users and members of groups that it names. The first tenant that names a
client is his; where there are tenants, who is named by none reads nothing.
"""

from __future__ import annotations

import grp
import pwd
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from cacheloader.errors import ConfigError
from cacheloader.quantity import parse_size
from cacheloader_daemon.prefixes import UrlPrefixes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheloader.fdpass import PeerCredentials

NOBODY = ""
"""Owner of what no tenant's session has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A share of the daemon. What is 0 or "" is not limited by it.

    Attributes:
        name: For errors, status and metrics.
        uids: Users whose it is.
        gids: Groups whose members' it is; without users and groups it is that of all who have no other.
        prefixes: URLs that they may read.
        guaranteed_bytes: Part of the cache that others cannot take from them.
        max_bytes: Most of the cache that they may fill, borrowed bytes included; 0 means all that others leave.
        max_bytes_per_s: Bytes a second that are fetched from origins for them.
        max_origin_requests_per_s: Requests a second to origins for them.
        max_connections: Connections at once.
        max_messages_per_s: Messages a second that the daemon reads from them; what comes faster waits unread.
    """

    name: str
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    prefixes: UrlPrefixes = field(default_factory=UrlPrefixes)
    guaranteed_bytes: int = 0
    max_bytes: int = 0
    max_bytes_per_s: int = 0
    max_origin_requests_per_s: int = 0
    max_connections: int = 0
    max_messages_per_s: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a tenant has no name; give it one, which is shown in errors and metrics")
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"tenant {self.name!r}: {one.name}={value} is negative; 0 means no limit")
        if self.max_bytes and self.max_bytes < self.guaranteed_bytes:
            raise ConfigError(
                f"tenant {self.name!r}: max_size={self.max_bytes} bytes is below its guaranteed_size="
                f"{self.guaranteed_bytes} bytes; leave max_size out, or raise it"
            )

    def holds(self, peer: PeerCredentials) -> bool:
        """Whether ``peer`` is named here, or nobody is."""
        return peer.uid in self.uids or bool(peer.groups & self.gids) or not (self.uids or self.gids)

    @classmethod
    def from_mapping(cls, options: Mapping[str, object], *, source: str) -> Self:
        """A tenant from its table in the configuration.

        Args:
            options: ``name``, ``users``, ``groups`` (names or numbers), ``allow``, ``deny`` (URL prefixes),
                ``guaranteed_size``, ``max_size``, ``max_bandwidth`` (sizes) and the limits that are numbers.
            source: Where they come from, for errors.

        Raises:
            ConfigError: A name is unknown to the table or to the system, or a value cannot work.
        """
        name = options.get("name")
        where = f"{source}: tenant {name!r}"
        unknown = sorted(set(options) - _KNOWN)
        if unknown:
            raise ConfigError(f"{where} has the unknown option {unknown[0]!r}; the options are {', '.join(_KNOWN)}")
        if not isinstance(name, str):
            raise ConfigError(f"{where} has no name; give it one, which is shown in errors and metrics")

        def size_bytes(option: str) -> int:
            value: Any = options.get(option, 0)
            return 0 if value == "" else parse_size(value, name=f"{where}: {option}")

        numbers = {option: _number(where, option, options.get(option, 0)) for option in _NUMBERS}
        return cls(
            name=name,
            uids=frozenset(_looked_up(where, "users", options.get("users", []))),
            gids=frozenset(_looked_up(where, "groups", options.get("groups", []))),
            prefixes=UrlPrefixes(
                allow=_texts(where, "allow", options.get("allow", [])),
                deny=_texts(where, "deny", options.get("deny", [])),
            ),
            guaranteed_bytes=size_bytes("guaranteed_size"),
            max_bytes=size_bytes("max_size"),
            max_bytes_per_s=size_bytes("max_bandwidth"),
            **numbers,
        )


_NUMBERS = ("max_origin_requests_per_s", "max_connections", "max_messages_per_s")
_KNOWN = {"name", "users", "groups", "allow", "deny", "guaranteed_size", "max_size", "max_bandwidth", *_NUMBERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who a connection belongs to.

    Attributes:
        uid: User.
        tenant: His share; ``None`` on a private daemon, and on a shared one that has no tenants.
    """

    uid: int
    tenant: Tenant | None = None

    @property
    def owner(self) -> str:
        """The name under which the cache's bytes are counted."""
        return NOBODY if self.tenant is None else self.tenant.name


def tenant_of(peer: PeerCredentials, tenants: Iterable[Tenant]) -> Tenant | None:
    """The share of ``peer``: the first that holds him."""
    return next((tenant for tenant in tenants if tenant.holds(peer)), None)


def _number(where: str, option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{where}: {option}={value!r} is no number; 0 means no limit")
    return value


def _texts(where: str, option: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f'{where}: {option}={value!r} is no list of URL prefixes such as "s3://bucket/folder/"')
    return tuple(value)


def _looked_up(where: str, option: str, value: object) -> list[int]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: {option}={value!r} is no list of names and numbers")
    found = []
    for one in value:
        if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
            found.append(one)
            continue
        if not isinstance(one, str):
            raise ConfigError(f"{where}: {option} holds {one!r}, which is neither a name nor a number")
        try:
            found.append(pwd.getpwnam(one).pw_uid if option == "users" else grp.getgrnam(one).gr_gid)
        except KeyError:
            kind = "user" if option == "users" else "group"
            raise ConfigError(
                f"{where}: {option} names {one!r}, and this system knows no such {kind}; correct it, or pass its number"
            ) from None
    return found
