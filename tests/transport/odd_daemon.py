"""Stands where the real daemon stands, keeps to the contract of its start, and then does what ODD_DAEMON says."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
from pathlib import Path

from tests.transport.scripted_peer import ScriptedPeer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--cache-size")
    parser.add_argument("--idle-timeout", type=float)
    parser.add_argument("--ready-fd", type=int)
    options = parser.parse_args()
    with (options.cache_dir / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {options.cache_size} {options.idle_timeout}\n")
    odd = os.environ.get("ODD_DAEMON", "")
    if odd == "dies":
        print("Traceback: the engine room is flooded", file=sys.stderr, flush=True)
        sys.exit(3)
    lock = os.open(options.cache_dir / "daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(options.ready_fd, {"error": "DaemonUnavailable", "message": "pid 4711 holds the directory"})
        sys.exit(1)
    match odd:
        case "refuses":
            say(options.ready_fd, {"error": "CacheUnusable", "message": "the disk is read-only"})
            sys.exit(1)
        case "babbles":
            os.write(options.ready_fd, b"hello\n")
        case "hangs":
            signal.pause()
    # Through the directory's descriptor: its path may be longer than a socket's address.
    folder = os.open(options.cache_dir, os.O_PATH | os.O_DIRECTORY)
    peer = ScriptedPeer(Path(f"/proc/self/fd/{folder}/daemon.sock"))
    peer.quota_bytes = int(options.cache_size or 2**30)
    peer.start()
    say(options.ready_fd, {"ready": True, "pid": os.getpid()})
    signal.pause()


def say(fd: int, line: dict[str, object]) -> None:
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


if __name__ == "__main__":
    main()
