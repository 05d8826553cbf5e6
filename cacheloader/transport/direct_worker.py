"""The helper process that reads without a daemon: ``python -m cacheloader.transport.direct_worker``.

With ``--fd N`` it serves exactly one client, over the socket that it inherits, and lives as long as that is open. With
``--listen PATH`` it serves the processes of its user that connect there, and leaves a moment after the last one has.
All of it runs on one event loop; what takes a processor goes to a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from cacheloader.manifest.record import Manifest
from cacheloader.transport.direct_conversation import Conversation, content_of
from cacheloader.transport.direct_door import Door
from cacheloader.transport.direct_manifests import ManifestFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheloader.transport.direct_datasets import DirectDatasets


async def _serve(options: argparse.Namespace) -> None:
    given = None
    if options.manifest_fd is not None:
        given = Manifest.from_buffer(content_of(options.manifest_fd))
    manifests = ManifestFolder(options.manifest_dir, given=given, handed_over=options.handed_over)
    datasets = _datasets(manifests, options.memory)
    if options.listen is None:
        sock = socket.socket(fileno=options.fd)
        await Conversation(sock, datasets=datasets, memory_bytes=options.memory).run()
        return

    async def converse(sock: socket.socket) -> None:
        await Conversation(sock, datasets=datasets, memory_bytes=options.memory).run()

    door = Door(options.listen, converse=converse, idle_s=options.idle)
    os.write(options.ready_fd, b"\n")
    os.close(options.ready_fd)
    await door.closed()


def _datasets(manifests: ManifestFolder, memory_bytes: int) -> Callable[[], DirectDatasets]:
    @cache
    def made() -> DirectDatasets:
        # With it come the engines, which take a moment to load: the greeting need not wait for that.
        from cacheloader.transport.direct_datasets import DirectDatasets

        return DirectDatasets(manifests, memory_bytes=memory_bytes)

    return made


def _stand_alone() -> None:
    """What differs for a process that outlives the one that started it, and serves many."""
    from cacheloader.origin.environment import forget_store_variables

    forget_store_variables()  # each client sends its own
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one client, or those of one user, until they have gone away."""
    parser = argparse.ArgumentParser(prog="python -m cacheloader.transport.direct_worker", description=__doc__)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--fd", type=int, help="connected SEQPACKET socket, inherited")
    place.add_argument("--listen", type=Path, help="where to make a listening socket, in a folder of this user alone")
    parser.add_argument("--memory", type=int, required=True, help="bytes that may be held beside leased shards")
    parser.add_argument("--manifest-dir", type=Path, required=True, help="where manifests are kept")
    parser.add_argument("--manifest-fd", type=int, help="memory file with the manifest of the data set, inherited")
    parser.add_argument("--handed-over", type=Path, help="where clients leave manifests that they know")
    parser.add_argument("--ready-fd", type=int, help="pipe that is written to once the socket listens")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without a client after which it leaves")
    options = parser.parse_args(arguments)
    # Ctrl-C reaches every process of the terminal; the trainer decides what it means, and this follows it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.listen is not None:
        _stand_alone()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options))
        # Nothing here outlives its clients: there is nothing to finish, and no reason to wait for the engines' threads.
        os._exit(0)


if __name__ == "__main__":
    main()
