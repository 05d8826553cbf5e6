"""Which peer a session talks to, and what happens when that peer dies in the middle of a run.

*Home* is the daemon that the user asked for. When its connection breaks, the session connects again, with a jittered
pause between attempts, for as long as the home endpoint is patient; a private daemon is started again by that. If it
does not come back, or breaks again and again, or hangs, the session goes *away*: it reads through the substitute, a
helper process that needs no daemon, in the same order and at the cost of reading the origin again. From
there it looks for home now and then when a shard is asked for (see ``homecoming``) and moves back once its data set is
open there; then it tells the daemon for how long it was missed.

A data set that nobody has opened yet is opened away from home only where a daemon listens and hangs: a wrong socket
path should be an error at the start, and not a run in which every process reads everything for itself.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from cacheloader.errors import DaemonError, DaemonUnavailable, DeadlineExceeded
from cacheloader.protocol import messages
from cacheloader.transport.endpoint import pause_s
from cacheloader.transport.homecoming import Homecoming
from cacheloader.transport.link import Link, PeerGone, PeerSilent
from cacheloader.transport.opening import Opening
from cacheloader.transport.statistics import RouteStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.transport.endpoint import Endpoint
    from cacheloader.transport.opening import Subject

_LEAST_WAIT_S = 1.0

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
        self._homecoming = Homecoming(home, options)
        self._reconnects = 0
        self._fallbacks = 0
        self._returns = 0
        self._went_away_s = 0.0
        self._away_s = 0.0
        self._untold = (0, 0.0)  # fallbacks, seconds away

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
            away_seconds=self._away_s + (time.monotonic() - self._went_away_s if self._is_away else 0.0),
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
            if self._substitute is None or not (subject.digest or isinstance(error, PeerSilent)):
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
            home = self._homecoming.look(subject)
            if home is not None:
                self._come_home(home)
        link = self.link
        if link is not None and (self._is_away or not avoid_home):
            return link
        lost = self._link
        self._leave()
        end = lost.end if lost is not None else ""
        cause: DaemonError = DaemonUnavailable(end or f"{self._home.name} failed again and again")
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
                self._tell_absence()
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
        endpoint = self._substitute if self._is_away else self._home
        if isinstance(error, PeerSilent) and endpoint is not None:
            endpoint.forsake()

    def close(self) -> None:
        """Close all connections and end what was started for this session alone; again does nothing."""
        self._leave()
        self._homecoming.forget()
        self._home.close()
        if self._substitute is not None:
            self._substitute.close()

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._is_away and self._substitute is not None:
            self._substitute.close()
            away_s = time.monotonic() - self._went_away_s
            self._away_s += away_s
            self._untold = (self._untold[0], self._untold[1] + away_s)
        self._is_away = False

    def _go_away(self, cause: DaemonError) -> None:
        assert self._substitute is not None
        self._is_away = True
        self._went_away_s = time.monotonic()
        self._fallbacks += 1
        self._untold = (self._untold[0] + 1, self._untold[1])
        self._homecoming.begin()
        _logger.warning(
            "%s; this process reads the origin through %s until %s is back",
            cause.message,
            self._substitute.name,
            self._home.name,
        )

    def _come_home(self, link: Link) -> None:
        self._leave()
        self._link = link
        self._returns += 1
        _logger.warning("%s is back; reading through it again", self._home.name)
        self._tell_absence()

    def _tell_absence(self) -> None:
        """Let the daemon count how often and for how long it was missed; nothing is lost if it does not take that."""
        link, (fallbacks, away_s) = self._link, self._untold
        if link is None or not fallbacks or link.version < messages.SIGNS_OF_LIFE:
            return
        self._untold = (0, 0.0)
        report = messages.Report(fetch_seconds=[], samples=0, fallbacks=fallbacks, away_seconds=away_s)
        try:
            link.send(report, deadline=0.0)
        except (DaemonError, TimeoutError) as error:
            _logger.info("%s does not hear that it was missed: %s", self._home.name, error)

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
                    opening = Opening.begin(
                        link, subject, private=endpoint.is_private, timeout_s=self._options.hello_timeout_s
                    )
                    return link, wait(link, opening)
                except BaseException:
                    if not self._homecoming.owns(link):
                        link.close()
                    raise
            except PeerSilent as error:
                if not endpoint.forsake():
                    raise
                _logger.warning("%s", error.message)
                continue
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
        self._homecoming.forget()
        try:
            return opening.finish(deadline=time.monotonic() + max(_LEAST_WAIT_S, self._home.patience_s))
        except TimeoutError as error:
            self._homecoming.adopt(link, opening)
            raise DeadlineExceeded(f"{self._home.name} needs time to open the data set again") from error

    def _connect(self, endpoint: Endpoint, manifest: Manifest | None, *, patience_s: float) -> Link:
        """One attempt at a connection that has been greeted.

        Args:
            endpoint: Where to.
            manifest: The data set, if it is known; then somebody is in the middle of reading it.
            patience_s: How much time is left for a peer that should be there.
        """
        hello_s = self._options.hello_timeout_s
        # A daemon that is still starting keeps a queue of connections and answers them late.
        wait_s = patience_s if manifest is not None and not endpoint.launch_s else max(patience_s, hello_s)
        sock = endpoint.connect(deadline=time.monotonic() + (endpoint.launch_s or max(wait_s, 0.0)), manifest=manifest)
        if endpoint.greets_late:
            wait_s = endpoint.launch_s
        link = Link(sock, peer=endpoint.name, silence_s=hello_s)
        try:
            endpoint.check(link.hello(deadline=time.monotonic() + max(wait_s, _LEAST_WAIT_S)))
        except BaseException:
            link.close()
            raise
        return link
