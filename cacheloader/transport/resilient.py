"""Which peer a session talks to, and what happens when that peer dies in the middle of a run.

*Home* is the daemon that the user asked for. When its connection breaks, the session connects again, with a jittered
pause between attempts, for as long as the home endpoint is patient; a private daemon is started again by that. If it
does not come back, or breaks again and again, the session goes *away*: it reads through the substitute, a helper
process of its own that needs no daemon, in the same order and at the cost of reading the origin again. From there it
looks for home now and then when a shard is asked for, lets its data set be opened there while it goes on reading, and
moves back once that is done.

A data set that nobody has opened yet is never opened away from home: a wrong socket path should be an error at the
start, and not a run in which every process reads everything for itself.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError, DaemonError, DaemonUnavailable, DeadlineExceeded
from cacheloader.transport.endpoint import pause_s
from cacheloader.transport.link import Link, PeerGone
from cacheloader.transport.opening import Opening
from cacheloader.transport.statistics import RouteStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.endpoint import Endpoint
    from cacheloader.transport.opening import Subject

_FIRST_LOOK_AFTER_S = 1.0
_LOOK_S = 1.0
_LOOK_LAUNCH_S = 5.0
_GLANCE_S = 0.05

_logger = logging.getLogger(__name__)


class Route:
    """The connection of one session.

    Args:
        home: The peer that the user asked for.
        substitute: Where to read while home is lost, ``None`` if nowhere.
        options: How long things may take.
    """

    def __init__(self, *, home: Endpoint, substitute: Endpoint | None, options: TransportOptions) -> None:
        self._home = home
        self._substitute = substitute
        self._options = options
        self._link: Link | None = None
        self._is_away = False
        self._return: tuple[Link, Opening] | None = None
        self._looks = 0
        self._next_look = 0.0
        self._reconnects = 0
        self._fallbacks = 0
        self._returns = 0

    @property
    def link(self) -> Link | None:
        """The open connection, if there is one."""
        return self._link if self._link is not None and self._link.is_open else None

    def statistics(self) -> RouteStatistics:
        """Where this session has read so far."""
        link = self.link
        return RouteStatistics(
            peer="" if link is None else link.peer,
            is_away=self._is_away,
            reconnects=self._reconnects,
            fallbacks=self._fallbacks,
            returns=self._returns,
        )

    def open(self, subject: Subject, progress: Callable[[str, int, int], None] | None) -> Manifest:
        """Open a data set whose manifest this process has not seen.

        Args:
            subject: The data set. With a digest it has been opened before, by another process, and may be opened away
                from home.
            progress: Called with (stage, done, total).

        Raises:
            CacheloaderError: It cannot be opened.
        """

        def wait(_: Link, opening: Opening) -> Manifest:
            return opening.wait(silence_s=self._options.timeout_s, progress=progress)

        self._leave()
        try:
            self._link, manifest = self._open_at(self._home, subject, wait)
        except DaemonError as error:
            if self._substitute is None or not subject.digest:
                raise
            self._go_away(error)
            self._link, manifest = self._open_at(self._substitute, subject, wait)
        return manifest

    def ready(self, subject: Subject, *, avoid_home: bool = False) -> Link:
        """A connection on which the data set is open: the present one if it is good.

        Args:
            subject: The data set, with its manifest.
            avoid_home: Whether home has failed more than once in a row, and is to be left alone for a while.

        Raises:
            DaemonError: There is no connection to be had.
            OriginError, DatasetError, ConfigError: The data set is no longer what it was.
        """
        avoid_home = avoid_home and self._substitute is not None
        if self.link is not None and self._is_away:
            self._look_for_home(subject)
        link = self.link
        if link is not None and (self._is_away or not avoid_home):
            return link
        lost = self._link
        self._leave()
        cause: DaemonError = DaemonUnavailable(f"{self._home.name} failed again and again")
        if not avoid_home:
            try:
                self._link, _ = self._open_at(self._home, subject, self._wait_at_home)
            except DaemonError as error:
                if self._substitute is None:
                    raise
                cause = error
            else:
                if lost is not None:
                    level = logging.INFO if self._reconnects else logging.WARNING
                    _logger.log(level, "%s; connected again", lost.end or f"{lost.peer} failed")
                    self._reconnects += 1
                return self._link
        assert self._substitute is not None
        self._go_away(cause)
        self._link, _ = self._open_at(self._substitute, subject, self._wait)
        return self._link

    def lost(self, error: DaemonError) -> None:
        """The present connection failed; ``ready`` makes another."""
        if self._link is not None:
            self._link.end = self._link.end or error.message
            self._link.close()

    def close(self) -> None:
        """Close all connections and end what was started for this session alone; again does nothing."""
        self._leave()
        self._forget_return()
        self._home.close()
        if self._substitute is not None:
            self._substitute.close()

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._is_away and self._substitute is not None:
            self._substitute.close()
        self._is_away = False

    def _go_away(self, cause: DaemonError) -> None:
        assert self._substitute is not None
        self._is_away = True
        self._fallbacks += 1
        self._looks = 0
        self._next_look = time.monotonic() + _FIRST_LOOK_AFTER_S
        _logger.warning(
            "%s; this process reads the origin through %s until %s is back",
            cause.message,
            self._substitute.name,
            self._home.name,
        )

    def _open_at(
        self, endpoint: Endpoint, subject: Subject, wait: Callable[[Link, Opening], Manifest]
    ) -> tuple[Link, Manifest]:
        """A connection with the data set open, tried again for as long as the endpoint is patient."""
        until = time.monotonic() + endpoint.patience_s
        attempt = 0
        while True:
            try:
                link = self._connect(endpoint, subject.manifest, patience_s=until - time.monotonic())
                try:
                    return link, wait(link, self._begin(link, endpoint, subject))
                except BaseException:
                    if self._return is None or self._return[0] is not link:
                        link.close()
                    raise
            except PeerGone:
                if time.monotonic() + (pause := pause_s(attempt)) >= until:
                    raise
            time.sleep(pause)
            attempt += 1

    def _wait(self, _: Link, opening: Opening) -> Manifest:
        return opening.wait(silence_s=self._options.timeout_s, progress=None)

    def _wait_at_home(self, link: Link, opening: Opening) -> Manifest:
        """As ``_wait``, but where there is a substitute, what takes long goes on by itself while one reads there."""
        if self._substitute is None:
            return self._wait(link, opening)
        self._forget_return()
        try:
            return opening.finish(deadline=time.monotonic() + max(_LOOK_S, self._home.patience_s))
        except TimeoutError as error:
            self._return = (link, opening)
            raise DeadlineExceeded(f"{self._home.name} needs time to open the data set again") from error

    def _look_for_home(self, subject: Subject) -> None:
        """Move back if home is there with the data set open; never fails, and waits no longer than a glance."""
        now = time.monotonic()
        glance_s = 0.0
        try:
            if self._return is None:
                if now < self._next_look:
                    return
                link = self._connect(self._home, subject.manifest, patience_s=_LOOK_S, look=True)
                self._return = (link, self._begin(link, self._home, subject))
                glance_s = _GLANCE_S
            link, opening = self._return
            opening.finish(deadline=now + glance_s)
        except TimeoutError:
            return
        except CacheloaderError as error:
            # Even a refusal of the data set by home does not matter as long as reading elsewhere works.
            self._forget_return()
            self._looks += 1
            self._next_look = time.monotonic() + min(
                _FIRST_LOOK_AFTER_S * 2 ** min(self._looks, 16), self._home.longest_pause_s
            )
            _logger.info("looked for %s: %s", self._home.name, error.message)
            return
        self._return = None
        self._leave()
        self._link = link
        self._returns += 1
        _logger.warning("%s is back; reading through it again", self._home.name)

    def _forget_return(self) -> None:
        returning, self._return = self._return, None
        if returning is not None:
            returning[0].close()

    def _connect(self, endpoint: Endpoint, manifest: Manifest | None, *, patience_s: float, look: bool = False) -> Link:
        """One attempt at a connection that has been greeted.

        Args:
            endpoint: Where to.
            manifest: The data set, if it is known; then somebody is in the middle of reading it.
            patience_s: How much time is left for a peer that should be there.
            look: Whether it is only a look, taken while the reading goes on elsewhere.
        """
        if look:
            wait_s = min(endpoint.launch_s, _LOOK_LAUNCH_S) or _LOOK_S
        elif endpoint.launch_s:
            wait_s = endpoint.launch_s
        elif manifest is None:
            # A daemon that is still starting keeps a queue of connections and answers them late.
            wait_s = max(patience_s, self._options.hello_timeout_s)
        else:
            wait_s = patience_s
        deadline = time.monotonic() + wait_s
        link = Link(endpoint.connect(deadline=deadline, manifest=manifest), peer=endpoint.name)
        try:
            endpoint.check(link.hello(deadline=max(deadline, time.monotonic() + _LOOK_S)))
        except BaseException:
            link.close()
            raise
        return link

    def _begin(self, link: Link, endpoint: Endpoint, subject: Subject) -> Opening:
        try:
            return Opening(
                link,
                subject,
                private=endpoint.is_private,
                deadline=time.monotonic() + self._options.hello_timeout_s,
            )
        except TimeoutError as error:
            raise PeerGone(f"{endpoint.name} does not read its messages") from error
