"""The command line of ``cacheloaderd``."""

from __future__ import annotations

import argparse
import json
import logging
import os
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheloader.errors import CacheloaderError, DaemonError
from cacheloader_daemon import allocator, footing, logs
from cacheloader_daemon.config import DaemonConfig
from cacheloader_daemon.garbage import no_collection
from cacheloader_daemon.index_worker import IndexWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


class ReadyLine:
    """The one line by which a launcher hears how the start went."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def ready(self) -> None:
        """Clients can connect."""
        self._say({"ready": True, "pid": os.getpid()})

    def failed(self, error: CacheloaderError) -> None:
        """The daemon will not start."""
        self._say({"error": type(error).__name__, "message": error.message})

    def _say(self, line: dict[str, Any]) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        except OSError as error:
            log.warning("whoever started this daemon no longer listens: %s", error)
        os.close(fd)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a daemon.

    Args:
        arguments: Of the command line, without the program; ``None`` for those of the process.

    Returns:
        Exit code: 0 after a regular end, 1 if it could not start, 2 for a wrong command line.
    """
    options = _parser().parse_args(arguments)
    if options.ready_fd is not None:
        os.set_inheritable(options.ready_fd, False)  # noqa: FBT003
    ready = ReadyLine(options.ready_fd)
    logs.begin()
    try:
        config = _config(options)
        logging.getLogger().setLevel(config.log_level)
        if config.private:
            logs.keep_short()
        allocator.reuse_freed_memory()
        footing.settle(config)
        with closing(IndexWorker(0)) as indexer:
            # Its imports take as long as our own, and another core.
            with suppress(DaemonError):  # the first index tries again, and tells
                indexer.start()
            with no_collection():
                # Imported late, so that a wrong option is told at once.
                from cacheloader_daemon.app import serve

            serve(config, indexer=indexer, is_ready=ready.ready)
    except CacheloaderError as error:
        log.error("%s: %s", type(error).__name__, error.message)  # noqa: TRY400
        ready.failed(error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cacheloaderd",
        description="The node daemon of cacheloader: shards from object storage, cached once per node.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with options; flags override it")
    parser.add_argument("--private", action="store_true", default=None, help="serve one user, leave when idle")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        action="append",
        help="directory of the cache; it belongs to the daemon; again for each further disk of a shared one",
    )
    parser.add_argument(
        "--cache-size", metavar="SIZE", help="bytes or text such as 200GiB; default: 75%% of free space"
    )
    parser.add_argument("--socket", metavar="PATH", help="where clients connect; default: daemon.sock in the directory")
    parser.add_argument("--idle-timeout", type=float, metavar="SECONDS", dest="idle_timeout_s", help="0 means never")
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="loopback port of /metrics and /healthz")
    parser.add_argument("--nice", type=int, metavar="N", help="added to the niceness, 0 to 19")
    parser.add_argument("--io-class", metavar="CLASS", help="priority at the disk: idle or best-effort")
    parser.add_argument("--cpus", metavar="LIST", help="processors that may be used, such as 0-3,8; default: all")
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    parser.add_argument("--ready-fd", type=int, metavar="N", help="write one JSON line to this descriptor when ready")
    return parser


def _config(options: argparse.Namespace) -> DaemonConfig:
    flags = {name: value for name, value in vars(options).items() if value is not None}
    flags.pop("ready_fd", None)
    path: Path | None = flags.pop("config", None)
    directories: list[str] = flags.pop("cache_dir", [])
    read = DaemonConfig.read(path) if path is not None else {}
    if directories:
        read.pop("cache_dir", None)
        read.pop("cache_dirs", None)
        flags |= {"cache_dir": directories[0]} if len(directories) == 1 else {"cache_dirs": directories}
    return DaemonConfig.from_mapping({**read, **flags}, source="the command line" if path is None else str(path))
