"""`storage_options`: names as fsspec's file systems have them, one table a store, unknown names refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOGGER = logging.getLogger(__name__)

# Name in storage_options -> field of our record; a dot leads into a nested dict. "" marks what steers only a cache or a
# thread of the fsspec class: known, without effect here.
S3_OPTIONS = {
    "anon": "anonymous",
    "key": "key",
    "username": "key",
    "client_kwargs.aws_access_key_id": "key",
    "secret": "secret",
    "password": "secret",
    "client_kwargs.aws_secret_access_key": "secret",
    "token": "token",
    "client_kwargs.aws_session_token": "token",
    "profile": "profile",
    "endpoint_url": "endpoint_url",
    "client_kwargs.endpoint_url": "endpoint_url",
    "client_kwargs.region_name": "region",
    "use_ssl": "use_ssl",
    "client_kwargs.use_ssl": "use_ssl",
    "client_kwargs.verify": "verify",
    "requester_pays": "requester_pays",
    "config_kwargs.s3.addressing_style": "addressing_style",
    "config_kwargs.connect_timeout": "",
    "config_kwargs.max_pool_connections": "",
    "config_kwargs.read_timeout": "",
    "config_kwargs.retries": "",
    "config_kwargs.signature_version": "",
    "asynchronous": "",
    "cache_regions": "",
    "default_block_size": "",
    "default_cache_type": "",
    "default_fill_cache": "",
    "max_concurrency": "",
    "skip_instance_cache": "",
    "use_listings_cache": "",
    "version_aware": "",
}
GS_OPTIONS = {
    "token": "token",
    "endpoint_url": "endpoint_url",
    "project": "",
    "access": "",
    "asynchronous": "",
    "block_size": "",
    "cache_timeout": "",
    "check_connection": "",
    "consistency": "",
    "default_location": "",
    "requests_timeout": "",
    "skip_instance_cache": "",
    "use_listings_cache": "",
    "version_aware": "",
}
AZURE_OPTIONS = {
    "account_name": "account_name",
    "account_key": "account_key",
    "account_host": "account_host",
    "sas_token": "sas_token",
    "connection_string": "connection_string",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "tenant_id": "tenant_id",
    "anon": "anonymous",
    "asynchronous": "",
    "blocksize": "",
    "default_cache_type": "",
    "default_fill_cache": "",
    "location_mode": "",
    "max_concurrency": "",
    "request_session": "",
    "skip_instance_cache": "",
    "socket_timeout": "",
    "use_listings_cache": "",
    "version_aware": "",
}
HTTP_OPTIONS = {
    "headers": "headers",
    "client_kwargs.headers": "headers",
    "ssl": "verify",
    "asynchronous": "",
    "block_size": "",
    "cache_type": "",
    "encoded": "",
    "same_scheme": "",
    "simple_links": "",
    "size_policy": "",
    "skip_instance_cache": "",
    "use_listings_cache": "",
}
PUBLIC_NAMES = frozenset({
    "account_host", "account_name", "addressing_style", "default_cache_type", "endpoint_url", "engine", "key",
    "location_mode", "profile", "project", "region_name", "tenant_id", "username", "verify",
})  # fmt: skip
"""Options whose values may appear in messages; all others are taken for secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach an S3 bucket; what is "" or ``None`` is left to the environment and the profile."""

    anonymous: bool = False
    key: str = ""
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    profile: str = ""
    endpoint_url: str = ""
    region: str = ""
    use_ssl: bool = True
    verify: bool | str = True
    requester_pays: bool = False
    addressing_style: str = "auto"

    def __post_init__(self) -> None:
        if bool(self.key) != bool(self.secret):
            given, missing = ("key", "secret") if self.key else ("secret", "key")
            raise ConfigError(f"storage_options give {given} without {missing}; pass both, or neither")
        if self.addressing_style not in {"auto", "path", "virtual"}:
            raise ConfigError(
                f'addressing_style={self.addressing_style!r} is unknown; it is one of "auto", "path", "virtual"'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GsOptions:
    """How to reach a Google Cloud Storage bucket."""

    token: object = field(default=None, repr=False)
    endpoint_url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureOptions:
    """How to reach an Azure container."""

    account_name: str = ""
    account_key: str = field(default="", repr=False)
    account_host: str = ""
    sas_token: str = field(default="", repr=False)
    connection_string: str = field(default="", repr=False)
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    tenant_id: str = ""
    anonymous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How to reach an HTTP server."""

    headers: dict[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True


def s3_options(options: Mapping[str, object]) -> S3Options:
    """``storage_options`` as s3fs has them; raises ``ConfigError`` as ``recognised``."""
    return S3Options(**recognised(options, S3_OPTIONS, store="s3"))  # type: ignore[arg-type]


def gs_options(options: Mapping[str, object]) -> GsOptions:
    """``storage_options`` as gcsfs has them; raises ``ConfigError`` as ``recognised``."""
    return GsOptions(**recognised(options, GS_OPTIONS, store="gs"))  # type: ignore[arg-type]


def azure_options(options: Mapping[str, object]) -> AzureOptions:
    """``storage_options`` as adlfs has them; raises ``ConfigError`` as ``recognised``."""
    return AzureOptions(**recognised(options, AZURE_OPTIONS, store="az"))  # type: ignore[arg-type]


def http_options(options: Mapping[str, object]) -> HttpOptions:
    """``storage_options`` as fsspec's HTTP file system has them; raises ``ConfigError`` as ``recognised``."""
    return HttpOptions(**recognised(options, HTTP_OPTIONS, store="http"))  # type: ignore[arg-type]


def recognised(options: Mapping[str, object], table: Mapping[str, str], *, store: str) -> dict[str, object]:
    """The fields that ``options`` set, by ``table``. ``None`` counts as not given.

    Raises:
        ConfigError: A name is unknown, a value has a type that cannot be meant, or two names say different things.
    """
    fields: dict[str, object] = {}
    for name, value in _flat(options, table):
        if name not in table:
            known = ", ".join(sorted(table))
            raise ConfigError(f"storage_options has the unknown name {name!r} for {store}; the known ones are {known}")
        target = table[name]
        if value is None:
            continue
        if not target:
            _LOGGER.warning("the storage option %s has no effect: it steers a part of fsspec that is not used", name)
            continue
        if not _fits(target, value):
            raise ConfigError(
                f"the storage option {name} has a value of type {type(value).__name__}, which it cannot be"
            )
        if fields.setdefault(target, value) != value:
            raise ConfigError(
                f"the storage option {name} contradicts another name for the same thing; pass one of them"
            )
    return fields


def _flat(options: Mapping[str, object], table: Mapping[str, str], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in options.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and full not in table and any(known.startswith(f"{full}.") for known in table):
            rows += _flat(value, table, f"{full}.")
        elif value is not None or full in table or "." in full:
            rows.append((full, value))
    return rows


def _fits(target: str, value: object) -> bool:
    if target == "token":  # gcsfs takes a method's name, a path or the key itself
        return isinstance(value, str | dict)
    if target == "verify":
        return isinstance(value, bool | str)
    if target in {"anonymous", "use_ssl", "requester_pays"}:
        return isinstance(value, bool)
    if target == "headers":
        return isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair)
    return isinstance(value, str)
