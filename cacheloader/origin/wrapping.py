"""Which protocols of fsspec read through another one, or from this machine's files, and are no store.

A daemon serves jobs other than its own user's. `filecache://` with ``target_protocol="file"``, `zip://` with a path in
``fo`` or `git://` with one in ``path`` would read, and some write, whatever the daemon may, past every rule about local
paths. So only `file://`, which those rules know, reaches local files. A class is looked at as well as its name, since
packages register protocols of their own.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_REFUSED = frozenset({
    "async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir", "dirfs", "dvc",
    "filecache", "generic", "git", "libarchive", "reference", "simplecache", "tar", "zip",
})  # fmt: skip
# Options that name another protocol, a file system or a place on this machine, in any class of fsspec.
_LEADING_ELSEWHERE = frozenset({
    "cache_storage", "fo", "fs", "index_store", "ref_storage_args", "remote_options", "remote_protocol",
    "storage_options", "target", "target_options", "target_protocol",
})  # fmt: skip
# What a class that wraps another takes in its constructor; `storage_options` alone is also how some take their own.
_WRAPPING_PARAMETERS = frozenset({"fo", "fs", "remote_protocol", "target_protocol"})
_ADDRESS_OF_SIX = re.compile(r"\[[0-9A-Fa-f:.]*\]")


def refuse_wrapping(root: str, *, protocol: str, options: Iterable[str]) -> None:
    """Make sure that a store is one, by what can be seen before anything is imported.

    Args:
        root: URL of the store.
        protocol: Its protocol.
        options: Names of the storage options.

    Raises:
        ConfigError: The protocol reads through another or from local files, an option leads there, or the URL chains
            protocols.
    """
    if "::" in _ADDRESS_OF_SIX.sub("", root):
        raise ConfigError(f"{root} chains protocols, which is not supported; pass the URL of the store itself")
    if protocol in _REFUSED:
        raise _refusal(root, protocol)
    if leading := sorted(_LEADING_ELSEWHERE.intersection(options)):
        raise ConfigError(
            f"the storage options {', '.join(leading)} for {root} lead to another file system or to local files, which "
            "is not supported; pass the URL of the store that holds the shards"
        )


def refuse_wrapping_class(root: str, *, protocol: str, kind: type) -> None:
    """The same by the class behind the protocol.

    Raises:
        ConfigError: It takes another file system, or is one of local files under another name than `file`.
    """
    taken = {name for base in kind.__mro__ if "__init__" in vars(base) for name in _parameters(base)}
    if taken & _WRAPPING_PARAMETERS or (protocol != "file" and issubclass(kind, LocalFileSystem)):
        raise _refusal(root, protocol)


def _parameters(kind: type) -> Iterable[str]:
    try:
        return inspect.signature(vars(kind)["__init__"]).parameters
    except ValueError:  # written in C, and takes nothing by these names
        return ()


def _refusal(root: str, protocol: str) -> ConfigError:
    return ConfigError(
        f"{root} cannot be read: the protocol {protocol} reads through another file system or from local files, which "
        "is not supported; pass the URL of the store that holds the shards, such as s3://bucket/, or a path"
    )
