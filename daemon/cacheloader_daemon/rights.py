"""What clients of a shared daemon may name: it reads with its own rights, and must not lend them out.

A URL's scheme picks a file system of fsspec, some of which read files of this node or wrap others; a storage option
may hold a path or choose among the daemon's own credentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheloader.origin.options import GsOptions

STORES = frozenset({"s3", "gs", "az", "abfs", "http", "https"})
"""Schemes that lead to other hosts and to nothing of this node."""

_GS_METHODS = {"anon", "google_default", "cloud"}
_LOCAL_STARTS = ("/", "~", ".", "file:", "local:")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRights:
    """What a client may make this daemon do.

    Attributes:
        schemes: Schemes that it may name besides ``STORES``.
        local_paths: Whether it may name files, which are read with the daemon's rights.
        profiles: Whether it may choose among the daemon's own AWS profiles.
    """

    schemes: frozenset[str] = frozenset()
    local_paths: bool = False
    profiles: bool = False

    def check(self, url: str, storage_options: Mapping[str, object]) -> None:
        """Refuse what goes beyond these rights.

        Args:
            url: Any canonical URL of the store.
            storage_options: As the client sent them.

        Raises:
            ConfigError: Something does, or an option is unknown.
        """
        from cacheloader.origin.location import scheme_of

        scheme = scheme_of(url)
        if scheme == "file":
            if not self.local_paths:
                raise _refused(url, f"reads no local paths for its clients, such as {url}", "allow_local_paths")
            return
        if scheme not in STORES | self.schemes:
            known = ", ".join(sorted(STORES | self.schemes))
            raise _refused(url, f"reads {known} for its clients, and not {scheme}", "allowed_schemes")
        options = {name: value for name, value in storage_options.items() if name != "engine"}
        if not self.profiles and options.get("profile"):
            raise _refused(
                url, "lets no client choose among its own profiles (profile); pass key and secret", "allow_profiles"
            )
        if self.local_paths:
            return
        for name in _options_with_paths(scheme, options):
            rule = f"reads no local paths for its clients, and the storage option {name} may be one"
            raise _refused(url, rule, "allow_local_paths")


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
