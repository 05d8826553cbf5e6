"""A real daemon under fire, beside a client that reads and must not notice.

What is promised: the daemon lives; the other client's session goes on with right bytes; memory and descriptors of the
daemon stay level; its log has no traceback; who breaks the protocol is told so by a typed error, or closed.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheloader import fdpass
from cacheloader.protocol import frames, messages
from tests.fuzz.descriptors import Descriptors
from tests.fuzz.frames_of_chaos import Frame, FrameMaker
from tests.support.node_daemon import NodeDaemon
from tests.support.raw_client import RawClient
from tests.support.shard_sets import write_shards
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READ_EVERY = 500
"""Frames between two reads of the bystander."""

FRAMES_PER_CONNECTION = 120
ANSWER_S = 60.0
SLACK_BYTES = 48 * 2**20
"""How much the daemon's memory may grow after the first fifth of a run: arenas of the allocator, caches that fill."""


@dataclass
class Report:
    """What happened.

    Attributes:
        seed: Makes the same frames again.
        frames: Sent over the socket; each was also given to the decoder.
        mutations: How many of each kind.
        connections: Opened for it.
        no_requests: Frames that are no requests; each makes an offender.
        told: Offenders (frames that are no requests, or broke a rule of the session) that got a typed error.
        closed: Offenders whose connection was closed without a word (it had no room for one).
        failures: Typed errors of requests that the session went on after, by kind.
        bystander_reads: Shards that the other client read meanwhile, right to the byte.
        rss_bytes: Of the daemon at each tenth of the run.
        fds: Of the daemon, before and after.
        wall_s: How long it took.
    """

    seed: int
    frames: int = 0
    mutations: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    no_requests: int = 0
    told: int = 0
    closed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    bystander_reads: int = 0
    rss_bytes: list[int] = field(default_factory=list)
    fds: tuple[int, int] = (0, 0)
    wall_s: float = 0.0

    @property
    def offenders(self) -> int:
        return self.told + self.closed

    def as_record(self) -> dict[str, Any]:
        fields = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {**fields, "offenders": self.offenders}


class Attack:
    """One run.

    Args:
        folder: Empty; takes the shards and the cache.
        seed: Makes the frames.
    """

    def __init__(self, folder: Path, *, seed: int) -> None:
        shards = write_shards(folder / "shards", num_shards=4, samples_per_shard=3)
        self._contents = [path.read_bytes() for path in shards.paths]
        paths = [str(path) for path in shards.paths]
        urls = [*paths, str(shards.folder), f"{shards.folder}/{{0..99999999}}.tar", f"{shards.folder}/*.tar", "",
                "relative.tar", "/nowhere/x.tar", "nosuch://x/y.tar", "file:///a\0b.tar", "s3://"]  # fmt: skip
        self._maker = FrameMaker(seed)
        self._descriptors = Descriptors(self._maker, urls)
        # A shared one: these are strangers, and a private one would obey the first of them who says Stop.
        config = folder / "cacheloaderd.toml"
        config.write_text("allow_local_paths = true\n")
        self._daemon = NodeDaemon(
            directory=folder / "cache", cache_size="64MiB", private=False, arguments=["--config", str(config)]
        )
        self._digest = ""
        self._folder = shards.folder
        self._report = Report(seed=seed)
        self._sock: socket.socket | None = None
        self._sent = 0
        self._last: Frame | None = None
        self._is_deep = False

    def run(self, num_frames: int, *, told: Callable[[Report], None] = lambda _report: None) -> Report:
        """Send so many frames and check what is promised; ``told`` is called at each tenth."""
        report, started_s = self._report, time.monotonic()
        self._daemon.start(timeout_s=100)
        try:
            with self._daemon.connect() as bystander:
                self._digest = bystander.open_dataset([self._folder]).digest
                bystander.follow([0, 1, 2, 3], rows=10)
                self._read(bystander)
                fds = self._daemon.num_fds
                for number in range(num_frames):
                    if number % max(1, num_frames // 10) == 0:
                        report.rss_bytes.append(self._daemon.rss_bytes)
                        told(report)
                    if number % READ_EVERY == 0:
                        self._read(bystander)
                    self._send(self._maker.frame(mild=self._is_deep))
                self._leave()
                self._read(bystander)
                assert self._daemon.process is not None
                assert self._daemon.process.poll() is None, f"the daemon is gone\n{self._daemon.log[-4000:]}"
                wait_until(lambda: self._daemon.num_fds <= fds, timeout_s=60)
                report.fds = fds, self._daemon.num_fds
                report.rss_bytes.append(self._daemon.rss_bytes)
            self._check(num_frames)
            assert self._daemon.stop(timeout_s=60) == 0
        finally:
            self._daemon.kill()
        report.wall_s = round(time.monotonic() - started_s, 1)
        return report

    def _check(self, num_frames: int) -> None:
        report, log = self._report, self._daemon.log
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
        assert "defect" not in log
        settled = report.rss_bytes[min(2, len(report.rss_bytes) - 1)]
        assert max(report.rss_bytes) <= settled + SLACK_BYTES, f"memory grew: {report.rss_bytes}"
        assert report.frames == num_frames

    def _read(self, bystander: RawClient) -> None:
        shard = self._report.bystander_reads % len(self._contents)
        lease = bystander.acquire(shard)
        assert lease.read() == self._contents[shard]
        lease.close()
        bystander.release(shard)
        self._report.bystander_reads += 1

    def _send(self, frame: Frame) -> None:
        report = self._report
        report.frames += 1
        self._last = frame
        report.mutations[frame.mutation] += 1
        is_request = frame.is_request  # the decoder raises nothing but its typed error
        report.no_requests += not is_request
        if self._sock is None or self._sent >= FRAMES_PER_CONNECTION:
            self._leave()
            self._join()
        assert self._sock is not None
        self._sent += 1
        fds = [self._descriptors.make(kind, frame.data) for kind in frame.fds]
        try:
            self._sock.settimeout(ANSWER_S)
            socket.send_fds(self._sock, [frame.data], fds)
        except (BrokenPipeError, ConnectionResetError):
            is_request = False  # a frame before this one was no good; what was said to it may still be there
        finally:
            for fd in fds:
                os.close(fd)
        self._hear(until_the_end=not is_request)

    def _join(self) -> None:
        """A new connection: most often one that goes no further than Hello and fails, else one that reads."""
        turn = self._report.connections = self._report.connections + 1
        self._is_deep = turn % 8 == 0
        client = RawClient(self._daemon.socket, greet=turn % 4 != 1, timeout_s=ANSWER_S)
        self._sock, self._sent = client.sock, 0
        if self._is_deep or turn % 16 == 2:
            client.open_dataset([self._folder], digest=self._digest)

    def _leave(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _hear(self, *, until_the_end: bool) -> None:
        """Take what was answered so far; of an offender, everything up to the end of his connection."""
        assert self._sock is not None
        self._sock.settimeout(ANSWER_S if until_the_end else 0.0)
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, fdpass.MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                self._sock.settimeout(ANSWER_S)
                return
            except ConnectionResetError:
                data, fds = b"", []
            except TimeoutError:
                raise AssertionError(f"neither told nor closed within {ANSWER_S} s: {self._last}") from None
            for fd in fds:
                os.close(fd)
            if not data:
                self._offended(told=False)
                return
            reply = frames.decode_reply(data)
            if isinstance(reply, messages.Failed):
                if reply.id == 0:
                    assert reply.kind in {"ProtocolError", "DaemonUnavailable"}, reply
                    self._offended(told=True)
                    return
                self._report.failures[reply.kind] += 1

    def _offended(self, *, told: bool) -> None:
        """The daemon ends the connection."""
        if told:
            self._report.told += 1
        else:
            self._report.closed += 1
        self._leave()
