"""Asking a peer for a lease, and giving back whatever it lends when the wait ends in another way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cacheloader.errors import CacheloaderError, DeadlineExceeded, ProtocolError
from cacheloader.protocol import messages
from cacheloader.transport.lease import FileLease

if TYPE_CHECKING:
    from cacheloader.transport.link import Answer, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A shard that somebody waits for.

    Attributes:
        shard: Index in the manifest.
        uri: Its URI.
        timeout_s: How long the wait may be in all, for errors.
        deadline: When it ends, on the clock of ``time.monotonic``.
    """

    shard: int
    uri: str
    timeout_s: float
    deadline: float


def lease(link: Link, wanted: Wanted) -> FileLease:
    """Ask for a shard and wait for both halves of the answer.

    Raises:
        DeadlineExceeded: They did not come in time.
        PeerGone: The peer is gone.
        ProtocolError: It answered something else.
        OriginError, DatasetError: As the peer found.
    """
    shard, uri, deadline = wanted.shard, wanted.uri, wanted.deadline
    request = messages.Acquire(id=link.next_id(), shard=shard)
    leased: Answer | None = None
    last_news = "it said nothing"
    try:
        link.send(request, deadline=deadline)
        while True:
            answer = link.receive(request.id, deadline=deadline)
            reply = answer.reply
            if isinstance(reply, messages.Progress):
                answer.close()
                last_news = f"last news: {reply.stage}, {reply.done} of {reply.total or 'an unknown number'}"
            elif isinstance(reply, messages.Leased) and leased is None:
                leased = answer
            elif isinstance(reply, messages.LeasedIndex) and leased is not None:
                index = _index(answer, reply.size_bytes, uri)
                break
            else:
                answer.close()
                raise ProtocolError(f"{link.peer} answered Acquire with {type(reply).__name__}")  # noqa: TRY301
    except BaseException as error:
        # Whatever ended the wait, also Ctrl-C: what was lent, or still comes, is given back.
        if leased is not None:
            leased.close()
            link.release(shard)
        elif not isinstance(error, CacheloaderError):
            link.abandon(request.id, shard)
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(
                f"shard {uri} did not come within {wanted.timeout_s:g} s from {link.peer} ({last_news}); "
                "look at its log and at the store, or raise timeout_s=",
                uri=uri,
            ) from error
        raise
    assert isinstance(leased.reply, messages.Leased)
    return FileLease(
        fd=leased.take_fd(),
        size_bytes=leased.reply.size_bytes,
        index=index,
        source=leased.reply.source,
        uri=uri,
        on_release=partial(link.release, shard),
    )


def _index(answer: Answer, size_bytes: int, uri: str) -> bytes:
    """The sample index, read whole: it is small, and a lease then holds one descriptor and not two."""
    try:
        parts: list[bytes] = []
        position = 0
        while position < size_bytes:
            part = os.pread(answer.take_fd(), size_bytes - position, position)
            if not part:
                raise ProtocolError(f"the index of {uri} ends at byte {position} of {size_bytes}", uri=uri)
            parts.append(part)
            position += len(part)
        return b"".join(parts)
    except OSError as error:
        raise ProtocolError(f"the index of {uri} cannot be read: {error.strerror}", uri=uri) from error
    finally:
        answer.close()
