"""A folder that is as slow as an object store mounted through FUSE: ``python -m benchmarks.harness.slow_folder …``.

A read that does not go on where its file handle stopped waits like a new request, and each handle delivers at most a
stream's rate. Handles do not slow each other. Nothing is cached: a data set is larger than memory, so its mount is
never warm.
"""

# ruff: noqa: ARG002  (the signatures are those of a file system)
from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S = 20.0
_LOOK_S = 0.02


class _Stream:
    """What one open file has been promised."""

    __slots__ = ("busy", "descriptor", "free_at", "stop")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.stop = -1
        self.free_at = 0.0
        self.busy = threading.Lock()

    def wait(self, *, start: int, size_bytes: int, latency_s: float, bytes_per_s: float) -> None:
        """Wait until these bytes would have come."""
        with self.busy:
            begin = max(time.monotonic(), self.free_at)
            if start != self.stop:
                begin += latency_s
            self.stop = start + size_bytes
            self.free_at = begin + size_bytes / bytes_per_s
            until = self.free_at
        time.sleep(max(0.0, until - time.monotonic()))


def mount(source: str, target: str, *, latency_s: float, bytes_per_s: float) -> None:
    """Serve ``source`` at ``target``, read-only, until it is unmounted."""
    import mfusepy

    class Slow(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self) -> None:
            self._streams: dict[int, _Stream] = {}

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            try:
                status = os.lstat(source + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            times = {name: getattr(status, name + "_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
            return {name: getattr(status, name) for name in names} | times

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", *(entry.name for entry in Path(source + path).iterdir())]

        def open(self, path: str, fi: Any) -> int:
            if fi.flags & os.O_ACCMODE != os.O_RDONLY:
                raise mfusepy.FuseOSError(30)  # EROFS
            descriptor = os.open(source + path, os.O_RDONLY)
            self._streams[descriptor] = _Stream(descriptor)
            fi.fh = descriptor
            fi.direct_io = 1
            return 0

        def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
            body = os.pread(fi.fh, size, offset)
            stream = self._streams[fi.fh]
            stream.wait(start=offset, size_bytes=len(body), latency_s=latency_s, bytes_per_s=bytes_per_s)
            return body

        def release(self, path: str, fi: Any) -> int:
            del self._streams[fi.fh]
            os.close(fi.fh)
            return 0

    mfusepy.FUSE(Slow(), target, raw_fi=True, foreground=True, ro=True, nothreads=False, fsname="slow-folder")


@contextmanager
def slow_folder(source: Path, target: Path, *, latency_s: float, bytes_per_s: float) -> Iterator[int]:
    """``source`` at ``target`` while the block runs; yields the serving process's id.

    Raises:
        RuntimeError: The mount did not come within ``READY_S``; says what its process printed.
    """
    target.mkdir(parents=True)
    command = [sys.executable, "-m", __spec__.name, str(source.resolve()), str(target)]
    command += [f"--latency-s={latency_s}", f"--bytes-per-s={bytes_per_s}"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_S
        while not os.path.ismount(target):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                printed = process.stdout.read().decode(errors="replace") if process.stdout else ""
                raise RuntimeError(f"no FUSE mount at {target} within {READY_S:.0f} s: {printed.strip()}")
            time.sleep(_LOOK_S)
        yield process.pid
    finally:
        with contextlib.suppress(subprocess.SubprocessError, FileNotFoundError):
            subprocess.run(["umount", "--lazy", str(target)], check=False, timeout=READY_S)
        try:
            process.wait(READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Mount a folder read-only, as slow as an object store.")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--latency-s", type=float, required=True, help="of a read that does not continue the last one")
    parser.add_argument("--bytes-per-s", type=float, required=True, help="most that one open file delivers")
    options = parser.parse_args()
    if not Path(options.source).is_dir():
        parser.error(f"{options.source} is no directory")
    mount(options.source, options.target, latency_s=options.latency_s, bytes_per_s=options.bytes_per_s)


if __name__ == "__main__":
    main()
