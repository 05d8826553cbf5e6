"""Reading without a daemon: a helper process, started for one session, that fetches whole shards into memory.

The helper exists because the engines that read object stores run threads and event loops of their own, which do not
survive a fork of the training process. It speaks the daemon's protocol over a socket pair, so that a session needs to
know nothing of it, and ends when that socket closes.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from cacheloader import fdpass
from cacheloader.transport import process

if TYPE_CHECKING:
    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import Welcome

MODULE = "cacheloader.transport.direct_worker"
MANIFESTS_NAME = "direct-manifests"

_GOODBYE_S = 5.0


class DirectWorker:
    """The endpoint of a helper process.

    Args:
        options: What it may hold in memory, and how long its start may take.
    """

    name = "its own helper process"
    is_private = True
    greets_late = True
    patience_s = 3.0
    longest_pause_s = 5.0

    def __init__(self, options: TransportOptions) -> None:
        self.launch_s = options.launch_timeout_s
        self._options = options
        self._child: process.Child | None = None

    def connect(self, *, deadline: float, manifest: Manifest | None) -> socket.socket:  # noqa: ARG002
        """A connection to a new helper; an earlier one is ended.

        Raises:
            DaemonUnavailable: It cannot be started.
        """
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = [theirs.fileno()]
        try:
            arguments = ["--fd", str(theirs.fileno()), "--memory", str(self._options.direct_memory_bytes)]
            arguments += ["--manifest-dir", str(self._options.directory / MANIFESTS_NAME)]
            if manifest is not None:
                # A helper has no memory: without this it would list and count the whole data set again.
                passed.append(fdpass.sealed_memory_file("cacheloader-manifest", manifest.to_bytes()))
                arguments += ["--manifest-fd", str(passed[-1])]
            self._child = process.start(MODULE, arguments, pass_fds=passed)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in passed[1:]:
                os.close(fd)
        return ours

    def check(self, welcome: Welcome) -> None:
        """Nothing to warn of."""

    def forsake(self) -> bool:
        """There is no other; the next ``connect`` ends it and starts a new one."""
        return False

    def close(self) -> None:
        """Collect the helper, which leaves when its connection is closed."""
        child, self._child = self._child, None
        if child is not None:
            child.end(timeout_s=_GOODBYE_S)
