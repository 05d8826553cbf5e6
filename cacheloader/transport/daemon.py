"""A session over a connection: to the node's shared daemon, to a private one, or to a helper that needs none."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from cacheloader import fdpass
from cacheloader.errors import ConfigError, DaemonError, DaemonUnavailable, DeadlineExceeded, ProtocolError
from cacheloader.protocol import messages
from cacheloader.protocol.plans import Accesses
from cacheloader.transport.leasing import Wanted, lease
from cacheloader.transport.link import PeerSilent
from cacheloader.transport.opening import Subject
from cacheloader.transport.statistics import TransportStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.base import AccessPlan
    from cacheloader.transport.lease import FileLease
    from cacheloader.transport.link import Link
    from cacheloader.transport.resilient import Route

_AVOID_HOME_AFTER = 2
_GIVE_UP_AFTER = 6

_Result = TypeVar("_Result")


class DaemonTransport:
    """A ``Transport`` that speaks the protocol.

    It survives the death of its peer: leases stay readable, and the next call finds another peer (see ``resilient``)
    and tells it the data set and the plan again. It survives a fork: the child opens a session of its own when it
    first needs one.

    Args:
        new_route: Makes the session's way to its peers; called again in a forked child.
        timeout_s: Longest wait for one shard.
    """

    def __init__(self, new_route: Callable[[], Route], *, timeout_s: float) -> None:
        self._new_route = new_route
        self._timeout_s = timeout_s
        self._subject: Subject | None = None
        self._plan: AccessPlan | None = None
        self._clock = 0
        self._is_closed = False
        self._told: Link | None = None  # the connection that knows the plan
        self._begin_in_this_process()

    def open_dataset(
        self,
        spec: messages.DatasetSpec,
        *,
        digest: str = "",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Manifest:
        """See ``Transport.open_dataset``."""
        self._enter()
        subject = Subject.named(spec, digest=digest)
        self._subject = self._plan = None
        self._clock = 0
        manifest = self._route.open(subject, progress)
        self._subject = replace(subject, digest=manifest.digest, manifest=manifest)
        return manifest

    def follow(self, plan: AccessPlan) -> None:
        """See ``Transport.follow``; with a lost peer the plan is told to the next one."""
        self._enter()
        self._opened()
        self._plan = plan
        self._clock = plan.clock
        self._told = None
        self._persist(lambda _link: None, what="the plan was not taken")

    def advance(self, clock: int) -> None:
        """See ``Transport.advance``; never waits and never fails."""
        self._enter()
        self._clock = clock
        link = self._route.link
        if link is not None and (self._plan is None or link is self._told):
            link.advance(clock)  # another connection learns it with the plan

    def acquire(self, shard: int) -> FileLease:
        """See ``Transport.acquire``."""
        self._enter()
        manifest = self._opened()
        uri = manifest.uri(shard)
        started = time.monotonic()
        deadline = started + self._timeout_s
        request = Wanted(shard=shard, uri=uri, timeout_s=self._timeout_s, deadline=deadline)
        taken = self._persist(lambda link: lease(link, request), what=f"shard {uri} cannot be had")
        self._leases.add(taken)
        self._acquires += 1
        self._acquire_seconds += time.monotonic() - started
        return taken

    def statistics(self) -> TransportStatistics:
        """What this session has done so far in this process."""
        self._enter()
        return TransportStatistics(
            acquires=self._acquires, acquire_seconds=self._acquire_seconds, route=self._route.statistics()
        )

    def close(self) -> None:
        """See ``Transport.close``. In a forked child it closes the child's copies and the parent never hears of it."""
        self._is_closed = True
        self._route.close()
        for taken in list(self._leases):
            taken.release()

    def _begin_in_this_process(self) -> None:
        self._pid = os.getpid()
        self._route = self._new_route()
        self._told = None
        self._leases: WeakSet[FileLease] = WeakSet()
        self._acquires = 0
        self._acquire_seconds = 0.0

    def _enter(self) -> None:
        if self._is_closed:
            raise ConfigError("this session is closed; open another")
        if self._pid != os.getpid():
            self._begin_in_this_process()

    def _opened(self) -> Manifest:
        if self._subject is None or self._subject.manifest is None:
            raise ConfigError("this session has no data set yet; call open_dataset first")
        return self._subject.manifest

    def _persist(self, task: Callable[[Link], _Result], *, what: str) -> _Result:
        """The result of ``task``, on as many connections as it takes."""
        assert self._subject is not None
        failures = 0
        hangs = False
        before = ""
        while True:
            link = self._route.ready(self._subject, avoid_home=hangs or failures >= _AVOID_HOME_AFTER)
            try:
                self._tell_plan(link)
                return task(link)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error.message}{before}", uri=error.uri) from error
            except DaemonError as error:
                failures += 1
                hangs = isinstance(error, PeerSilent)
                before = f"; before that, {error.message}"
                self._route.lost(error)
                if failures >= _GIVE_UP_AFTER:
                    raise DaemonUnavailable(
                        f"{what}, {failures} times in a row; the last time: {error.message}"
                    ) from error

    def _tell_plan(self, link: Link) -> None:
        plan = self._plan
        if plan is None or link is self._told:
            return
        accesses = Accesses(first_clock=plan.first_clock, stop_clock=plan.stop_clock, shard=plan.shard)
        request = messages.FollowPlan(id=link.next_id(), num_accesses=len(plan.shard), clock=self._clock)
        fd = fdpass.sealed_memory_file("cacheloader-plan", accesses.to_bytes())
        deadline = time.monotonic() + self._timeout_s
        try:
            link.send(request, fd, deadline=deadline)
            answer = link.receive(request.id, deadline=deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{link.peer} did not take the plan of {len(plan.shard)} accesses within {self._timeout_s:g} s; "
                "look at its log, or raise timeout_s="
            ) from error
        finally:
            os.close(fd)
        answer.close()
        if not isinstance(answer.reply, messages.Accepted):
            raise ProtocolError(f"{link.peer} answered FollowPlan with {type(answer.reply).__name__}")
        self._told = link
