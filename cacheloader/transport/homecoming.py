"""The way back to a daemon that was lost, taken in steps while the reading goes on elsewhere."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError
from cacheloader.transport.link import Link
from cacheloader.transport.opening import Opening

if TYPE_CHECKING:
    from cacheloader.config import TransportOptions
    from cacheloader.transport.endpoint import Endpoint
    from cacheloader.transport.opening import Subject

_FIRST_LOOK_AFTER_S = 1.0
_CONNECT_S = 1.0
_LAUNCH_S = 5.0
_GLANCE_S = 0.05

_logger = logging.getLogger(__name__)


class Homecoming:
    """Looks for home now and then, and lets it open the data set, without waiting for any of that.

    A daemon that hangs still has its connections accepted by the kernel. The greeting is left there and read later: a
    daemon that wakes up answers it at once.

    Args:
        home: The peer that the user asked for.
        options: How long things may take.
    """

    def __init__(self, home: Endpoint, options: TransportOptions) -> None:
        self._home = home
        self._options = options
        self._link: Link | None = None
        self._opening: Opening | None = None
        self._looks = 0
        self._next_look_s = 0.0

    def begin(self) -> None:
        """The session has just gone away; the first look comes after a moment."""
        self._looks = 0
        self._next_look_s = time.monotonic() + _FIRST_LOOK_AFTER_S

    def adopt(self, link: Link, opening: Opening) -> None:
        """Home is connected and needs time to open the data set; wait for that here."""
        self.forget()
        self._link, self._opening = link, opening

    def owns(self, link: Link) -> bool:
        """Whether ``link`` is the connection that is on its way."""
        return link is self._link

    def look(self, subject: Subject) -> Link | None:
        """A connection to home with the data set open, if there is one; never fails and waits no longer than a glance.

        Args:
            subject: The data set, with its manifest.
        """
        try:
            return self._look(subject)
        except TimeoutError:
            return None
        except CacheloaderError as error:
            # Even a refusal of the data set by home does not matter as long as reading elsewhere works.
            self.forget()
            self._looks += 1
            pause_s = min(_FIRST_LOOK_AFTER_S * 2 ** min(self._looks, 16), self._home.longest_pause_s)
            self._next_look_s = time.monotonic() + pause_s
            _logger.info("looked for %s: %s", self._home.name, error.message)
            return None

    def forget(self) -> None:
        """Close the connection that is on its way, if there is one."""
        link, self._link, self._opening = self._link, None, None
        if link is not None:
            link.close()

    def _look(self, subject: Subject) -> Link | None:
        glance_s = 0.0
        if self._link is None:
            now = time.monotonic()
            if now < self._next_look_s:
                return None
            deadline = now + (min(self._home.launch_s, _LAUNCH_S) or _CONNECT_S)
            sock = self._home.connect(deadline=deadline, manifest=subject.manifest)
            self._link = Link(sock, peer=self._home.name, silence_s=self._options.hello_timeout_s)
            self._link.say_hello()
            glance_s = _GLANCE_S
        link = self._link
        if self._opening is None:
            self._home.check(link.hear_welcome(deadline=time.monotonic() + glance_s))
            self._opening = Opening.begin(
                link, subject, private=self._home.is_private, timeout_s=self._options.hello_timeout_s
            )
            glance_s = _GLANCE_S
        self._opening.finish(deadline=time.monotonic() + glance_s)
        self._link = self._opening = None
        return link
