"""Taking possession of a cache directory: ours alone, on a local disk, and never somebody else's files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from cacheloader.errors import CacheUnusable
from cacheloader_daemon.store.folders import names_in

MARKER = "cacheloader-cache"
FORMAT = 1
"""Raised with each change of the layout that an older daemon would misread."""

_NEW_MARKER = "daemon.marker"

_NEIGHBOURS = ("daemon.", "launch.", "direct-manifests")
"""Files that the daemon and its clients may put here before the store is opened: locks, log, socket,
manifests of a process that reads without a daemon."""

_NETWORK = frozenset(
    {
        "afs", "beegfs", "ceph", "cifs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys",
        "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre",
        "mountpoint-s3", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip

_SHOWN_LETTERS = 200

_WAY_OUT = "name a directory on a local disk that the daemon may write (cache_dir)"


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    note: str = "this directory belongs to cacheloader, which deletes files in it at any time"


def claim(directory: Path) -> int:
    """Make ``directory`` if it is missing, check that it is a cache of ours or empty, and mark it.

    Returns:
        A descriptor of the directory, owned by the caller. Work through it stays in this directory, whatever is
        mounted or unmounted over its path later.

    Raises:
        CacheUnusable: It cannot be used; the text says why and what to do.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            if not directory.is_dir():
                raise
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(directory, f"cannot be made or opened: {error.strerror}", way_out=way_out(error)) from error
    try:
        _refuse_network(directory, dir_fd)
        _mark(directory, dir_fd)
    except OSError as error:
        os.close(dir_fd)
        raise _unusable(directory, f"cannot be written: {error.strerror}", way_out=way_out(error)) from error
    except BaseException:
        os.close(dir_fd)
        raise
    return dir_fd


def file_system_of(device: int, mountinfo: str) -> str:
    """Type of the file system with this device number, "" if it is not listed.

    Args:
        device: ``st_dev`` of a file on it.
        mountinfo: Text of ``/proc/self/mountinfo``. Source: proc_pid_mountinfo(5).
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, separator, source = line.partition(" - ")
        if separator and mount.split()[2] == number:
            return source.split()[0]
    return ""


def is_network(file_system: str) -> bool:
    """Whether files of this type lie on another machine, where a cache is of no use and LMDB breaks."""
    return file_system in _NETWORK


def _refuse_network(directory: Path, dir_fd: int) -> None:
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return
    file_system = file_system_of(os.fstat(dir_fd).st_dev, mountinfo)
    if is_network(file_system):
        raise _unusable(directory, f"lies on a network file system ({file_system}), no faster than what it would cache")


def _mark(directory: Path, dir_fd: int) -> None:
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        _mark_new(directory, dir_fd)
    else:
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
        _check_marker(directory, text)
    os.fchmod(dir_fd, 0o700)


def _mark_new(directory: Path, dir_fd: int) -> None:
    names = sorted(names_in(".", dir_fd=dir_fd))
    foreign = [name for name in names if not name.startswith(_NEIGHBOURS) and name != "lost+found"]
    if foreign:
        raise _unusable(
            directory, f"is not empty and was not made by cacheloader (it holds {foreign[0]!r}), which deletes files"
        )
    # Under its name it is whole at any moment; the other name is one that a later start does not take for foreign.
    fd = os.open(_NEW_MARKER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        os.write(fd, msgspec.json.encode(_Marker(format=FORMAT)))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(_NEW_MARKER, MARKER, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _check_marker(directory: Path, text: bytes) -> None:
    try:
        marker = msgspec.json.decode(text, type=_Marker)
    except msgspec.MsgspecError as error:
        raise _unusable(directory, f"has a marker file {MARKER!r} that cannot be read ({error})") from error
    if marker.format != FORMAT:
        raise _unusable(
            directory, f"was made by another version of cacheloader (layout {marker.format}, this one has {FORMAT})"
        )


def way_out(error: OSError) -> str:
    """What somebody can do about an error of the disk."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "free some space there, or name a directory on another local disk (cache_dir)"
        case errno.ENAMETOOLONG:
            return "name a shorter path (cache_dir)"
        case _:
            return _WAY_OUT


def shown(directory: Path) -> str:
    """A path as messages show it, which may be given by mistake and be of any length."""
    text = str(directory)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}… ({len(text)} letters)"


def _unusable(directory: Path, why: str, *, way_out: str = _WAY_OUT) -> CacheUnusable:
    return CacheUnusable(f"the cache directory {shown(directory)} {why}; {way_out}", uri=str(directory))
