"""What clients of a shared daemon may name: it reads with its own rights, and must not lend them out.

A URL's scheme picks a file system of fsspec, some of which read files of this node or wrap others; a storage option
may hold a path, choose among the daemon's own credentials, or lead them to another host.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import msgspec

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheloader.origin.options import GsOptions
    from cacheloader_daemon.tenants import Visitor

STORES = frozenset({"s3", "gs", "az", "abfs", "http", "https"})
"""Schemes that lead to other hosts and to nothing of this node."""

_GS_METHODS = {"anon", "google_default", "cloud"}
_LOCAL_STARTS = ("/", "~", ".", "file:", "local:")


class ClientRights(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may make this daemon do.

    Attributes:
        schemes: Schemes that it may name besides ``STORES``.
        local_paths: Whether it may name files, which are read with the daemon's rights.
        profiles: Whether it may choose among the daemon's own AWS profiles.
        endpoints: Stores to which the daemon's own credentials may be led by a storage option, without a slash at the
            end.
    """

    schemes: frozenset[str] = frozenset()
    local_paths: bool = False
    profiles: bool = False
    endpoints: frozenset[str] = frozenset()

    def check(self, url: str, storage_options: Mapping[str, object], *, visitor: Visitor | None = None) -> None:
        """Refuse what goes beyond these rights.

        Args:
            url: Any canonical URL of the store.
            storage_options: As the client sent them.
            visitor: Who asks.

        Raises:
            ConfigError: Something does, or an option is unknown.
        """
        from cacheloader.origin.location import scheme_of

        scheme = scheme_of(url)
        tenant = visitor.tenant if visitor is not None else None
        if scheme == "file":
            self._check_files(url, storage_options, named=tenant is not None and bool(tenant.prefixes.folders))
            return
        if scheme not in STORES | self.schemes:
            known = ", ".join(sorted(STORES | self.schemes))
            raise _refused(url, f"reads {known} for its clients, and not {scheme}", "allowed_schemes")
        options = {name: value for name, value in storage_options.items() if name != "engine"}
        if not self.profiles and options.get("profile"):
            raise _refused(
                url, "lets no client choose among its own profiles (profile); pass key and secret", "allow_profiles"
            )
        if not self.local_paths:
            for name in _options_with_paths(scheme, options):
                rule = f"reads no local paths for its clients, and the storage option {name} may be one"
                raise _refused(url, rule, "allow_local_paths")
        lead = _lead_of(scheme, options)
        if lead is None or lead.endpoint.rstrip("/") in self.endpoints:
            return
        if not lead.own_credentials:
            raise _refused(
                url,
                f"sends its own credentials nowhere else for a client, and the storage option {lead.option} does that; "
                "pass your own credentials, or anon",
                "allowed_endpoints",
            )
        if tenant is not None and lead.endpoint and not tenant.prefixes.cover(f"{lead.endpoint.rstrip('/')}/"):
            raise _refused(
                url,
                f"lets the tenant {tenant.name!r} read {tenant.prefixes.text}, which does not cover the endpoint "
                f"{lead.endpoint} of user {visitor.uid if visitor else 0}",
                "allowed_endpoints, or allow of that tenant",
            )

    def _check_files(self, url: str, storage_options: Mapping[str, object], *, named: bool) -> None:
        if not self.local_paths and not named:
            raise _refused(
                url,
                f"reads no local paths for its clients, such as {url}",
                "allow_local_paths, or the folder in allow of a tenant",
            )
        # Another engine would not look where links lead, see ``MountOrigin``.
        if storage_options.get("engine", "auto") not in {"auto", "mount"}:
            raise _refused(url, "reads local paths with the engine mount alone; leave engine out", "allowed_schemes")


def realm(url: str, storage_options: Mapping[str, object]) -> str:
    """What keeps shards apart that a store may have answered otherwise for these options; "" for what all share.

    Credentials decide whether a store answers, and a few other options decide *what*: a Host header leads to another
    site behind the same address, an unverified certificate to anybody. What one user brought with those, or with
    options of a store of which that is not known, is nobody else's.
    """
    from cacheloader.origin.location import scheme_of

    options = {name: value for name, value in storage_options.items() if name != "engine"}
    swaying: Mapping[str, object]
    match scheme_of(url):
        case "s3" | "http" | "https":
            swaying = {name: value for name, value in _flat(options) if _sways(name, value)}
        case "gs" | "az" | "abfs" | "file":
            swaying = {}
        case _:
            swaying = options
    if not swaying:
        return ""
    text = json.dumps(swaying, sort_keys=True, default=repr)
    return f"#{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _sways(name: str, value: object) -> bool:
    last = name.rpartition(".")[2]
    if "headers." in name:
        return last.lower() != "authorization"
    return last in {"verify", "ssl", "use_ssl"} and value is not True and value is not None


def _flat(options: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class _Lead(msgspec.Struct, frozen=True, kw_only=True):
    """Where options lead requests.

    Attributes:
        endpoint: The host, "" for the usual one.
        option: The storage option that says so.
        own_credentials: Whether nothing of the daemon's can travel there.
    """

    endpoint: str
    option: str
    own_credentials: bool


def _lead_of(scheme: str, options: Mapping[str, object]) -> _Lead | None:
    """Where ``options`` lead credentials that would else go to the store's usual place; ``None`` if nowhere else."""
    from cacheloader.origin import options as known

    match scheme:
        case "s3":
            s3 = known.s3_options(options)
            own = s3.anonymous or bool(s3.key)
            if s3.endpoint_url:
                endpoint = s3.endpoint_url
                if "://" not in endpoint:
                    endpoint = f"{'https' if s3.use_ssl else 'http'}://{endpoint}"
                return _Lead(endpoint=endpoint, option="endpoint_url", own_credentials=own)
            if s3.verify is False or not s3.use_ssl:
                return _Lead(endpoint="", option="use_ssl" if s3.verify else "verify", own_credentials=own)
            if s3.requester_pays:
                return _Lead(endpoint="", option="requester_pays", own_credentials=own)
        case "gs":
            # A key that the client sends is mixed with what the daemon's environment names, so it counts for nothing.
            gs = known.gs_options(options)
            if gs.endpoint_url:
                return _Lead(endpoint=gs.endpoint_url, option="endpoint_url", own_credentials=gs.token == "anon")  # noqa: S105
        case "az" | "abfs":
            azure = known.azure_options(options)
            if azure.account_host:
                return _Lead(endpoint=azure.account_host, option="account_host", own_credentials=azure.anonymous)
            fields = dict(part.partition("=")[::2] for part in azure.connection_string.split(";"))
            named = fields.get("BlobEndpoint") or fields.get("EndpointSuffix", "core.windows.net")
            if named != "core.windows.net":
                return _Lead(endpoint=named, option="connection_string", own_credentials=azure.anonymous)
        case _:
            pass
    return None


def _refused(url: str, rule: str, option: str) -> ConfigError:
    return ConfigError(f"this daemon is shared and {rule}; its configuration can allow it ({option})", uri=url)


def _options_with_paths(scheme: str, options: Mapping[str, object]) -> Iterator[str]:
    """Names of the options whose values may be paths of this node."""
    from cacheloader.origin import options as known

    # Read by name also where fsspec would take every name: a client session of aiohttp, for one, can be told to send
    # the daemon's own ~/.netrc.
    match scheme:
        case "s3":
            if isinstance(known.s3_options(options).verify, str):
                yield "verify"
        case "http" | "https":
            if isinstance(known.http_options(options).verify, str):
                yield "ssl"
        case "gs":
            if not _is_harmless(known.gs_options(options)):
                yield "token"
        case "az" | "abfs":
            known.azure_options(options)
        case _:
            yield from _local_values(options)


def _is_harmless(chosen: GsOptions) -> bool:
    if isinstance(chosen.token, dict):
        # Other kinds of keys name files, or commands, that give a token.
        return chosen.token.get("type") == "service_account"
    return chosen.token is None or chosen.token in _GS_METHODS


def _local_values(options: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _local_values(value, f"{prefix}{name}.")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and one.lower().startswith(_LOCAL_STARTS):
                yield f"{prefix}{name}"
