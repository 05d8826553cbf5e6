"""Questions to a store that may be slow, busy or away for a moment: each has a deadline and is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cacheloader.errors import ConfigError, OriginError, OriginTimeout
from cacheloader.keys import ByteRange, split_range
from cacheloader.origin.failure import failure, reading
from cacheloader.origin.transfer import INQUIRY, TransferLimits, first_of, raise_alone, with_retries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from cacheloader.origin.base import Bytes, ObjectInfo, Origin

_T = TypeVar("_T")
_R = TypeVar("_R")

STATS_IN_FLIGHT = 64
LISTINGS_IN_FLIGHT = 8

FAMILIAR = TransferLimits(deadline_s=60.0)
"""For a store that has answered before, and is worth waiting for."""

_ENDLESS_S = 7 * 86_400.0
_LONGEST_TURN_S = 0.02


class PatientOrigin:
    """An origin whose callers need not know that stores fail.

    A store that has never answered is given up soon, for the URL or the network may be wrong and somebody waits; one
    that has answered gets more time.

    Args:
        origin: The store; stays the caller's to close.
        stranger: Limits before the first answer.
        familiar: Limits from then on.
    """

    def __init__(
        self, origin: Origin, *, stranger: TransferLimits = INQUIRY, familiar: TransferLimits = FAMILIAR
    ) -> None:
        self._origin = origin
        self._limits = stranger
        self._familiar = familiar

    async def stat(self, uri: str) -> ObjectInfo:
        """Describe one object (see ``Origin.stat``)."""
        return await self._ask(lambda: self._origin.stat(uri), action="describing", uri=uri)

    async def read(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of exactly this version of an object, in ranges of at most 8 MiB, one by one."""
        parts: list[Bytes] = []
        for part in split_range(stop - start, part_bytes=self._limits.part_bytes):
            wanted = ByteRange(start=start + part.start, stop=start + part.stop)
            parts.append(await self._read_range(info, wanted))
        return bytes(parts[0]) if len(parts) == 1 else b"".join(map(memoryview, parts))

    async def search(
        self,
        directory: str,
        *,
        keep: Callable[[ObjectInfo], bool],
        seen: Callable[[int], None],
        stop_after: int | None = None,
        keep_at_most: int | None = None,
    ) -> list[ObjectInfo]:
        """The objects below ``directory`` that ``keep`` wants, sorted bytewise by URI, each once.

        What nobody keeps takes no memory, however much lies there. A listing may take long, as long as it moves.

        Args:
            directory: Ends in ``/``.
            keep: Called once an object.
            seen: Called with the number of objects looked at so far, now and then and at the end.
            stop_after: Give up behind so many objects, and return what was found among them.
            keep_at_most: Refuse a directory that holds more of them; ``None`` for no limit.

        Raises:
            ConfigError: More than ``keep_at_most`` objects are kept.
        """

        def attempt() -> Awaitable[list[ObjectInfo]]:
            return self._search(directory, keep, seen, stop_after, keep_at_most)

        return await self._ask(attempt, action="listing", uri=directory, timeout_s=_ENDLESS_S)

    async def _read_range(self, info: ObjectInfo, wanted: ByteRange) -> Bytes:
        def attempt() -> Awaitable[Bytes]:
            return self._origin.read_range(info.uri, wanted, version=info.version)

        timeout_s = self._limits.timeout_s(wanted.size_bytes)
        return await self._ask(attempt, action=reading(wanted), uri=info.uri, timeout_s=timeout_s)

    async def _search(
        self,
        directory: str,
        keep: Callable[[ObjectInfo], bool],
        seen: Callable[[int], None],
        stop_after: int | None,
        keep_at_most: int | None,
    ) -> list[ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        count = 0
        clock = asyncio.get_running_loop().time
        silence_s = self._limits.timeout_floor_s
        heard_s = turn_s = clock()
        try:
            async with (
                asyncio.timeout_at(heard_s + silence_s) as silence,
                _closed_early(self._origin.list(directory)) as rows,
            ):
                async for info in rows:
                    count += 1
                    if clock() - heard_s > silence_s / 8:  # now and then: a reschedule for each would cost more
                        heard_s = clock()
                        silence.reschedule(heard_s + silence_s)
                        seen(count)
                    if keep(info):
                        found[info.uri] = info
                        if keep_at_most is not None and len(found) > keep_at_most:
                            raise ConfigError(
                                f"there are more shards below {directory} than the {keep_at_most} that a data set "
                                "may still have here; name a smaller part of them",
                                uri=directory,
                            )
                    if count == stop_after:
                        break
                    if clock() - turn_s > _LONGEST_TURN_S:  # a page has many objects, and others share the loop
                        await asyncio.sleep(0)
                        turn_s = clock()
        except TimeoutError as error:
            cause = f"no answer in {silence_s:g} s"
            raise failure(OriginTimeout, action="listing", uri=directory, cause=cause) from error
        seen(count)
        return [found[uri] for uri in sorted(found)]

    async def _ask(
        self, attempt: Callable[[], Awaitable[_T]], *, action: str, uri: str, timeout_s: float | None = None
    ) -> _T:
        limits = self._limits if timeout_s is None else msgspec.structs.replace(self._limits, timeout_floor_s=timeout_s)
        try:
            answer = await with_retries(attempt, action=action, uri=uri, limits=limits)
        except OriginError as error:
            if not error.retryable:
                self._limits = self._familiar
            raise
        self._limits = self._familiar
        return answer


async def ask_each(
    items: Iterable[_T],
    question: Callable[[_T], Awaitable[_R]],
    *,
    in_flight: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[_R]:
    """Ask ``question`` of every item, at most ``in_flight`` at a time; the first failure ends all the others.

    Args:
        items: What to ask about.
        question: Called once an item.
        in_flight: Tasks at most.
        progress: Called with the number of answers after each.

    Returns:
        The answers in the order of ``items``.
    """
    waiting = list(items)
    answers: dict[int, _R] = {}
    numbers = iter(range(len(waiting)))

    async def work() -> None:
        for number in numbers:
            answers[number] = await question(waiting[number])
            progress(len(answers))

    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(waiting))):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        first = first_of(failures)
    if first is not None:
        raise_alone(first)
    return [answers[number] for number in range(len(waiting))]


@asynccontextmanager
async def _closed_early(rows: AsyncIterator[_T]) -> AsyncGenerator[AsyncIterator[_T], None]:
    """``rows``, closed at the end if it is a generator, so that no request stays open."""
    try:
        yield rows
    finally:
        if isinstance(rows, AsyncGenerator):
            await rows.aclose()
