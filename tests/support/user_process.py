"""A client of the daemon that runs as another user of this machine: a process that becomes him and obeys line by line.

``python -m tests.support.user_process UID GID[,GID...]``; one JSON object a line in, one out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cacheloader.errors import from_wire
from tests.support.parent_death import die_with_parent

REPOSITORY = Path(__file__).parents[2]


@dataclass
class UserProcess:
    """A user with a connection; what the daemon answers him is returned, or raised as the error that it named."""

    uid: int
    groups: tuple[int, ...] = (65533,)
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Self:
        groups = ",".join(map(str, self.groups))
        self.process = subprocess.Popen(
            die_with_parent([sys.executable, "-m", "tests.support.user_process", str(self.uid), groups]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/daemon"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def _ask(self, what: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"user {self.uid} ended"
        answer = json.loads(line)
        if "error" in answer:
            raise from_wire(answer["error"], answer["message"], answer["uri"])
        return answer["result"]

    def open(self, socket: Path, urls: list[str], *, digest: str = "", **options: object) -> dict[str, Any]:
        """Open a data set on a new connection, in place of an earlier one; its digest and its URIs."""
        return self._ask("open", socket=str(socket), urls=urls, digest=digest, options=options)

    def read(self, shard: int) -> dict[str, Any]:
        """Acquire a shard: the digest of its bytes, the source, and what else the descriptors allow (nothing)."""
        return self._ask("read", shard=shard)

    def status(self, socket: Path | None = None) -> dict[str, Any]:
        return json.loads(self._ask("status", socket="" if socket is None else str(socket)))

    def try_files(self, folder: Path) -> list[str]:
        """What of a folder this user can list or open."""
        return self._ask("try_files", folder=str(folder))


def _become(uid: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setgid(groups[0])
    os.setuid(uid)


class _Obedient:
    def __init__(self) -> None:
        self.client: Any = None

    def open(self, socket: str, urls: list[str], digest: str, options: dict[str, object]) -> dict[str, Any]:
        from tests.support.raw_client import RawClient

        if self.client is not None:
            self.client.sock.close()
        self.client = RawClient(Path(socket))
        manifest = self.client.open_dataset(urls, digest=digest, options=options)
        return {"digest": manifest.digest, "uris": [manifest.uri(shard) for shard in range(len(manifest))]}

    def read(self, shard: int) -> dict[str, Any]:
        lease = self.client.acquire(shard)
        found = {"bytes": hashlib.sha256(lease.read()).hexdigest(), "source": lease.leased.source, "writable": []}
        for name, fd in (("data", lease.data_fd), ("index", lease.index_fd)):
            found["writable"] += [f"{name}: {way}" for way in _ways_to_change(fd)]
        found["names"] = [os.readlink(f"/proc/self/fd/{fd}") for fd in (lease.data_fd, lease.index_fd)]
        lease.close()
        self.client.release(shard)
        return found

    def status(self, socket: str) -> str:
        from tests.support.raw_client import RawClient

        if socket:
            self.client = RawClient(Path(socket))
        return self.client.status().decode()

    def try_files(self, folder: str) -> list[str]:
        found = []
        for path in [Path(folder), *(Path(folder) / name for name in ("index", "blobs", "manifests"))]:
            with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError):
                found += [str(path), *os.listdir(path)]
        return found


def _ways_to_change(fd: int) -> list[str]:
    ways = {
        "write": lambda: os.pwrite(fd, b"x", 0),
        "open again for writing": lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)),
        "truncate": lambda: os.ftruncate(fd, 0),
        "chmod": lambda: os.fchmod(fd, 0o666),
        "chown": lambda: os.fchown(fd, os.getuid(), -1),
        "reach its folder": lambda: os.listdir(os.path.dirname(os.readlink(f"/proc/self/fd/{fd}"))),
    }
    found = []
    for way, attempt in ways.items():
        try:
            attempt()
        except OSError:
            continue
        found.append(way)
    return found


def main() -> None:
    from cacheloader.errors import CacheloaderError
    from tests.support import raw_client  # noqa: F401  # before the rights to read it may be gone

    _become(int(sys.argv[1]), [int(gid) for gid in sys.argv[2].split(",")])
    obedient = _Obedient()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"result": getattr(obedient, what)(**arguments)}
        except CacheloaderError as error:
            answer = {"error": type(error).__name__, "message": error.message, "uri": error.uri}
        except OSError as error:
            answer = {"error": type(error).__name__, "message": str(error), "uri": ""}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
