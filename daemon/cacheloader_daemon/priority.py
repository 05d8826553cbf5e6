"""How the daemon gives way to a training job: processor priority, disk priority, processors.

All three belong to threads and are inherited by those started later, so they are set before any other is started.

Source: ioprio_set(2), setpriority(2), sched_setaffinity(2).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from typing import Self

import msgspec

from cacheloader.errors import ConfigError

log = logging.getLogger(__name__)

_CALL_NUMBERS = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_IO_PRIORITIES = {"best-effort": 2 << _CLASS_SHIFT | 7, "idle": 3 << _CLASS_SHIFT}
IO_CLASSES = ("", *_IO_PRIORITIES)


class Priority(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon asks of the kernel.

    Attributes:
        nice: Added to the niceness, 0 to 19.
        io_class: ``"idle"`` (the disk serves all others first), ``"best-effort"`` (the lowest of that class), or "" to
            leave it. Disks without a scheduler that knows priorities ignore it.
        cpus: Processors that may be used, empty for all.
    """

    nice: int = 0
    io_class: str = ""
    cpus: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.nice <= 19:
            raise ConfigError(f"nice={self.nice} is not between 0 and 19")
        if self.io_class not in IO_CLASSES:
            raise ConfigError(f'io_class={self.io_class!r} is none of "best-effort", "idle"; leave it out to keep it')

    @classmethod
    def parse(cls, *, nice: int, io_class: str, cpus: str) -> Self:
        """From options; ``cpus`` is text such as ``"0-3,8"``.

        Raises:
            ConfigError: One of them cannot work.
        """
        return cls(nice=nice, io_class=io_class, cpus=_processors(cpus))

    def take(self) -> None:
        """Set it for this thread, and so for all that are started from now on.

        Raises:
            ConfigError: This process may use none of the processors.
        """
        if self.nice:
            os.nice(self.nice)
        if self.io_class:
            self._set_io_class()
        if self.cpus:
            usable = self.cpus & os.sched_getaffinity(0)
            if not usable:
                raise ConfigError(
                    f"cpus={_text(self.cpus)} has none of the processors that this process may use "
                    f"({_text(os.sched_getaffinity(0))}); name some of these"
                )
            os.sched_setaffinity(0, usable)

    def _set_io_class(self) -> None:
        number = _CALL_NUMBERS.get(platform.machine())
        if number is None:
            log.warning("io_class has no effect: the number of ioprio_set on %s is not known", platform.machine())
            return
        library = ctypes.CDLL(None, use_errno=True)
        if library.syscall(number, _WHO_PROCESS, 0, _IO_PRIORITIES[self.io_class]) != 0:
            log.warning("io_class=%s has no effect: %s", self.io_class, os.strerror(ctypes.get_errno()))


def _processors(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ConfigError(f'cpus={text!r} is no list of processors; write it like "0-3,8"')
        found.update(range(int(first), min(int(last or first), 2**16) + 1))
    return frozenset(found)


def _text(cpus: frozenset[int] | set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))
