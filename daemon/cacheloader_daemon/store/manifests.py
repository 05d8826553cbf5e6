"""Manifests as files, the newest few of them: small, read by every client, and asked for again after a restart."""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING

from cacheloader_daemon.store.folders import names_in, unlink_if_there
from cacheloader_daemon.store.trouble import disk_trouble

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_MANIFESTS = 64

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ManifestFiles:
    """The directory of manifests.

    Args:
        folder_fd: The directory; stays open while this is used.
    """

    def __init__(self, folder_fd: int) -> None:
        self._folder_fd = folder_fd
        for name in names_in(".", dir_fd=folder_fd):
            if _DIGEST.fullmatch(name) is None:
                unlink_if_there(name, dir_fd=self._folder_fd)

    def put(self, digest: str, block: Buffer) -> None:
        """Keep a manifest; those used longest ago give way.

        Raises:
            DiskTrouble: The disk does not take it.
        """
        assert _DIGEST.fullmatch(digest), f"{digest!r} is no digest of a manifest"
        temporary = f".{secrets.token_hex(8)}.new"
        with disk_trouble("writing a manifest", f"manifests/{digest}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o600, dir_fd=self._folder_fd)
            try:
                with memoryview(block).cast("B") as view:
                    done = 0
                    while done < len(view):
                        done += os.write(fd, view[done:])
                os.fchmod(fd, 0o440)
                # Unlike a blob it carries no mark by which a later start could doubt it; and it is small and rare.
                os.fsync(fd)
                os.rename(temporary, digest, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            except BaseException:
                unlink_if_there(temporary, dir_fd=self._folder_fd)
                raise
            finally:
                os.close(fd)
            self._trim()

    def open(self, digest: str) -> int | None:
        """A fresh read-only descriptor, owned by the caller; ``None`` if the manifest is not there.

        Raises:
            DiskTrouble: It cannot be opened.
        """
        if _DIGEST.fullmatch(digest) is None:
            return None
        with disk_trouble("opening a manifest", f"manifests/{digest}"):
            try:
                fd = os.open(digest, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._folder_fd)
            except FileNotFoundError:
                return None
            try:
                # What is in use stays among the newest.
                os.utime(fd)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _trim(self) -> None:
        names = [name for name in names_in(".", dir_fd=self._folder_fd) if _DIGEST.fullmatch(name)]
        names.sort(key=lambda name: os.stat(name, dir_fd=self._folder_fd).st_mtime_ns, reverse=True)
        for name in names[MAX_MANIFESTS:]:
            unlink_if_there(name, dir_fd=self._folder_fd)
