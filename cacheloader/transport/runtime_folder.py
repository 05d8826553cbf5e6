"""The folder where the processes of one user meet on one node, and nobody else can reach.

Source: XDG Base Directory Specification (``XDG_RUNTIME_DIR``).
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_NAME = "cacheloader"


def runtime_folder() -> Path:
    """A folder of mode 0700 that belongs to this user: below ``XDG_RUNTIME_DIR``, else below the temporary directory.

    Raises:
        OSError: There is none, and none can be made; the text says what is wrong with each place.
    """
    failures: list[str] = []
    for folder in _candidates():
        try:
            _own(folder)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
        else:
            return folder
    raise OSError("; ".join(failures))


def _candidates() -> list[Path]:
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    # The specification says that a relative path is ignored.
    candidates = [Path(named, _NAME)] if os.path.isabs(named) else []  # noqa: PTH117
    return [*candidates, Path(tempfile.gettempdir(), f"{_NAME}-{os.geteuid()}")]


def _own(folder: Path) -> None:
    """Make ``folder`` this user's alone, or fail: in a place that all may write, another may have made it first."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise OSError("it is no folder") from None
        if found.st_uid != os.geteuid():
            raise OSError(f"it belongs to user {found.st_uid}") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError("it cannot be written")
