"""Manifests kept in files between helper processes, which have no other memory.

A helper leaves with its clients, and the next one reads the data set that it resolved: without this each would list it,
and where nobody wrote down sample counts read all of it, again.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from typing import TYPE_CHECKING

from cacheloader.errors import ProtocolError
from cacheloader.manifest.record import Manifest

if TYPE_CHECKING:
    from pathlib import Path

_KEPT = 32
_log = logging.getLogger(__name__)


class ManifestFolder:
    """A folder of manifests, each named by its digest, so that what is found can be trusted once it was checked.

    Args:
        folder: Made when it is first needed; that it cannot be written costs time, and is no error.
        given: A manifest that the client has sent along, ``None`` if it knows none.
        handed_over: Another folder, in which clients leave manifests that they know; nothing is kept there.
    """

    def __init__(self, folder: Path, *, given: Manifest | None = None, handed_over: Path | None = None) -> None:
        self._folder = folder
        self._given = given
        self._folders = (folder,) if handed_over is None else (handed_over, folder)

    def load(self, digest: str) -> Manifest | None:
        """The manifest called ``digest``, ``None`` if there is none or the file is damaged."""
        if self._given is not None and self._given.digest == digest:
            return self._given
        for folder in self._folders:
            try:
                with (folder / digest).open("rb") as file:
                    manifest = Manifest.from_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError, ProtocolError):
                continue
            if manifest.digest == digest:
                return manifest
        return None

    def save(self, manifest: Manifest) -> None:
        """Keep ``manifest``; those used longest ago make room."""
        path = self._folder / manifest.digest
        part = self._folder / f".{manifest.digest}.{secrets.token_hex(8)}"
        try:
            if path.exists():
                os.utime(path)
                return
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                part.write_bytes(manifest.to_bytes())
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
            for old in sorted(self._folder.glob("*"), key=_age)[_KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "the manifest of the data set cannot be kept in %s (%s): each worker will resolve the data set for "
                "itself; set CACHELOADER_CACHE_DIR to a directory that can be written",
                self._folder,
                error.strerror,
            )


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
