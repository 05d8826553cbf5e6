"""Bringing bytes from an origin: parallel ranges, a deadline for each request, retries that end."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from cacheloader.errors import ConfigError, OriginError, OriginThrottled, OriginTimeout
from cacheloader.keys import ByteRange, split_range
from cacheloader.origin.failure import failure, reading
from cacheloader.origin.retry import Backoff
from cacheloader.origin.slots import TransferSlots, Urgency

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from cacheloader.origin.base import Bytes, ObjectInfo, Origin

_T = TypeVar("_T")


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how wide one transfer may be.

    Attributes:
        part_bytes: Length of a ranged request. 8 MiB is where S3's throughput per connection no longer grows.
        max_parallel: Ranged requests of one object at a time.
        timeout_floor_s: Shortest deadline of a request, for latency and a slow start.
        slowest_bytes_per_s: A request that is slower than this is given up.
        deadline_s: Time from the first start of a request until it is no longer retried.
        backoff: The waits between.
    """

    part_bytes: int = 8 * 2**20
    max_parallel: int = 8
    timeout_floor_s: float = 15.0
    slowest_bytes_per_s: float = 256 * 2**10
    deadline_s: float = 180.0
    backoff: Backoff = msgspec.field(default_factory=Backoff)

    def __post_init__(self) -> None:
        for name in ("part_bytes", "max_parallel", "timeout_floor_s", "slowest_bytes_per_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be more than 0")

    def timeout_s(self, size_bytes: int) -> float:
        """Deadline of one request for ``size_bytes``."""
        return max(self.timeout_floor_s, size_bytes / self.slowest_bytes_per_s)


INQUIRY = TransferLimits(timeout_floor_s=4.5, deadline_s=8.0, backoff=Backoff(longest_s=2.0))
"""For listing and describing: a wrong URL or key is reported within 10 s."""


async def transfer(
    origin: Origin,
    info: ObjectInfo,
    write_at: Callable[[int, Bytes], Awaitable[None]],
    *,
    limits: TransferLimits,
    slots: TransferSlots,
    urgency: Urgency | None = None,
    failed: Callable[[OriginError], None] | None = None,
    random_unit: Callable[[], float] = random.random,
) -> None:
    """Copy all bytes of exactly the version ``info`` names. When it fails for good, its other requests are cancelled.

    Args:
        origin: Where the object lies.
        info: The object, its size and its version.
        write_at: Called with an offset and the bytes from there on, in no promised order, concurrently, each byte once.
            What it raises ends the transfer as it is.
        limits: Deadlines and width.
        slots: The budget that all transfers share; a slot is kept until the bytes are written.
        urgency: Whether somebody waits; prefetch if ``None``.
        failed: Told of each request that failed, also of those that are asked again.
        random_unit: Gives random numbers in [0, 1).

    Raises:
        OriginError: A request failed in a way that asking again does not cure, or until its deadline.
    """
    urgency = urgency or Urgency()
    retries = _Retries(
        host=origin.origin_id,
        limits=limits,
        slots=slots,
        urgency=urgency,
        failed=failed or _ignore,
        random_unit=random_unit,
    )
    if not info.size_bytes:  # the version still has to be right
        empty = ByteRange(start=0, stop=0)
        await retries.run(lambda: origin.read_range(info.uri, empty, version=info.version), empty, info.uri, _drop)
        return
    parts = split_range(info.size_bytes, part_bytes=limits.part_bytes)

    async def copy(parts: Iterator[ByteRange]) -> None:
        for part in parts:  # all copiers take from one iterator

            async def read(part: ByteRange = part) -> Bytes:
                return await origin.read_range(info.uri, part, version=info.version)

            async def write(body: Bytes, part: ByteRange = part) -> None:
                await write_at(part.start, body)

            await retries.run(read, part, info.uri, write)

    num_copiers = min(limits.max_parallel, -(-info.size_bytes // limits.part_bytes))
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_copiers):
                group.create_task(copy(parts))
    except BaseExceptionGroup as failures:
        first = first_of(failures)
    if first is not None:
        raise_alone(first)


async def with_retries(
    attempt: Callable[[], Awaitable[_T]],
    *,
    action: str,
    uri: str,
    limits: TransferLimits = INQUIRY,
    random_unit: Callable[[], float] = random.random,
) -> _T:
    """The result of ``attempt``, asked again as long as that can help.

    Args:
        attempt: One try, such as ``lambda: origin.stat(uri)``.
        action: What it does, for errors, such as ``"describing"``.
        uri: What it is about.
        limits: ``timeout_floor_s`` is the deadline of one try.
        random_unit: Gives random numbers in [0, 1).

    Raises:
        OriginError: At once if asking again does not help, else the last one when the deadline is near.
    """
    clock = asyncio.get_running_loop().time
    started_s, failures = clock(), 0
    while True:
        try:
            timeout_s = _cut(limits.timeout_floor_s, elapsed_s=clock() - started_s, limits=limits)
            return await _one_try(attempt, action=action, uri=uri, timeout_s=timeout_s)
        except OriginError as error:
            failures += 1
            delay_s = limits.backoff.delay_s(failures, random_unit())
            _raise_if_hopeless(
                error,
                failures,
                elapsed_s=clock() - started_s,
                delay_s=delay_s,
                timeout_s=limits.timeout_floor_s,
                limits=limits,
            )
        await asyncio.sleep(delay_s)


class _Retries(msgspec.Struct, frozen=True, kw_only=True):
    """The retries of one transfer's ranges."""

    host: str
    limits: TransferLimits
    slots: TransferSlots
    urgency: Urgency
    failed: Callable[[OriginError], None]
    random_unit: Callable[[], float]

    async def run(
        self,
        read: Callable[[], Awaitable[Bytes]],
        part: ByteRange,
        uri: str,
        write: Callable[[Bytes], Awaitable[None]],
    ) -> None:
        clock = asyncio.get_running_loop().time
        timeout_s = self.limits.timeout_s(part.size_bytes)
        first_s, failures, delay_s = 0.0, 0, 0.0
        last: OriginError | None = None

        def raise_if_hopeless(error: OriginError) -> None:
            _raise_if_hopeless(
                error,
                failures,
                elapsed_s=clock() - first_s,
                delay_s=delay_s,
                timeout_s=timeout_s,
                limits=self.limits,
            )

        try:
            while True:
                async with self.slots.hold(self.host, size_bytes=part.size_bytes, urgency=self.urgency):
                    started_s = clock()
                    # The wait for the first slot does not count: a prefetch may stand in line for long.
                    first_s = first_s or started_s
                    if last is not None:
                        delay_s = 0.0
                        raise_if_hopeless(last)  # the wait for a slot may have taken all that was left
                    try:
                        cut_s = _cut(timeout_s, elapsed_s=started_s - first_s, limits=self.limits)
                        body = await _one_try(
                            lambda: self.slots.hedges.run(read, host=self.host, size_bytes=part.size_bytes),
                            action=reading(part),
                            uri=uri,
                            timeout_s=cut_s,
                        )
                    except OriginError as error:
                        last = error
                        failures += 1
                        self.failed(error)
                        if isinstance(error, OriginThrottled):
                            self.slots.throttled(self.host, started_s=started_s)
                        delay_s = self.limits.backoff.delay_s(failures, self.random_unit())
                        raise_if_hopeless(error)
                    else:
                        self.slots.succeeded(self.host, started_s=started_s, size_bytes=part.size_bytes)
                        await write(body)
                        return
                await asyncio.sleep(delay_s)
        finally:
            last = None  # an error holds this frame, which would hold the error until the collector comes


def _cut(timeout_s: float, *, elapsed_s: float, limits: TransferLimits) -> float:
    """The deadline of one try: what is left, unless a try may take longer than the whole, as a long listing may."""
    return timeout_s if timeout_s > limits.deadline_s else min(timeout_s, limits.deadline_s - elapsed_s)


async def _one_try(attempt: Callable[[], Awaitable[_T]], *, action: str, uri: str, timeout_s: float) -> _T:
    try:
        async with asyncio.timeout(timeout_s):
            return await attempt()
    except TimeoutError as error:
        raise failure(OriginTimeout, action=action, uri=uri, cause=f"no answer in {round(timeout_s, 1):g} s") from error


def _raise_if_hopeless(
    error: OriginError, failures: int, *, elapsed_s: float, delay_s: float, timeout_s: float, limits: TransferLimits
) -> None:
    """Raise ``error`` if another try cannot help or would come too late."""
    if not error.retryable:
        try:
            raise error
        finally:
            del error  # it holds this frame, which would hold it, and all that led here, until the collector comes
    # A try that is cut after a moment says nothing new, and would hide what the last full one said.
    worthwhile_s = min(timeout_s, limits.deadline_s) / 4
    if elapsed_s + delay_s + worthwhile_s >= limits.deadline_s:
        tries = "1 try" if failures == 1 else f"{failures} tries"
        message = f"{error.message} (given up after {tries} in {elapsed_s:.1f} s)"
        raise type(error)(message, uri=error.uri) from error


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first of those that a task group reports, which ended all others."""
    first = failures.exceptions[0]
    failures.__traceback__ = None  # the frame in which the group was raised holds the group
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def raise_alone(error: BaseException) -> NoReturn:
    """Raise ``error`` with its own cause, outside of the handler of the group that it was in.

    An error that holds a frame which holds it, or a group which holds it, lives on until the collector comes, and with
    it everything that the frames on its way hold: the names of a million shards, for one.
    """
    try:
        raise error from error.__cause__
    finally:
        del error


async def _drop(_body: Bytes) -> None:
    return None


def _ignore(_error: OriginError) -> None:
    return None
