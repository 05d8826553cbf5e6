"""Frames made from real ones: mutated in their structure, so that they get past one check and fail at a later one."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cacheloader import fdpass
from cacheloader.protocol import frames, messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NUMBERS = (0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_TAGS = ("Hello", "OpenDataset", "FollowPlan", "Advance", "Acquire", "Release", "Report", "GetStatus", "Stop")
_REPLIES = ("Welcome", "Leased", "Failed", "Status", "DatasetSpec", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One datagram.

    Attributes:
        data: Its bytes.
        mutation: What was done to it.
        fds: Kinds of the descriptors that go with it, see ``Descriptors``.
    """

    data: bytes
    mutation: str
    fds: tuple[str, ...] = ()

    @property
    def is_request(self) -> bool:
        """Whether the protocol knows it, whatever a session then thinks of it."""
        try:
            frames.decode_request(self.data)
        except frames.ProtocolError:
            return False
        return len(self.data) <= fdpass.MAX_MESSAGE_BYTES and len(self.fds) < 2


class FrameMaker:
    """Makes frames; equal seeds make equal frames."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._mutations: Sequence[tuple[Callable[[bytes], bytes], int]] = (
            (lambda data: data, 50),
            (self._truncated, 6),
            (self._extended, 3),
            (self._flipped, 8),
            (self._retyped, 10),
            (self._without_a_field, 4),
            (self._with_another_field, 4),
            (self._with_another_tag, 4),
            (self._spliced, 4),
            (self._with_a_huge_length, 4),
            (self._nested, 2),
            (self._noise, 3),
            (self._oversized, 1),
            (self._repeated_field, 2),
        )
        self._weights = [weight for _, weight in self._mutations]

    def frame(self, *, mild: bool = False) -> Frame:
        """The next one; a mild one is most often what a client in a hurry might send."""
        request = self._hasty_request() if mild else self._request()
        if mild and self._random.random() < 0.98:
            return Frame(data=frames.encode(request), mutation="none", fds=self._own_fd(request))
        (mutate, _), *_ = self._random.choices(self._mutations, self._weights)
        data = mutate(frames.encode(request)) or b"\x00"
        return Frame(
            data=data,
            mutation=getattr(mutate, "__name__", "none").strip("_").replace("<lambda>", "none"),
            fds=self._fds(request),
        )

    def spec(self, urls: Sequence[str]) -> bytes:
        """A data set's description, likely broken."""
        whole = frames.encode(
            messages.DatasetSpec(
                urls=self._random.choices(urls, k=self._random.randrange(1, 4)),
                format=self._random.choice(["", "webdataset", "nonsense"]),
                storage_options=self._random.choice([{}, {"engine": "mount"}, {"x": [1, {"y": None}]}]),
            )
        )
        (mutate, _), *_ = self._random.choices(self._mutations[:12], self._weights[:12])
        return mutate(whole) or b"\x00"

    def _request(self) -> messages.Request:
        number = self._random.choice
        small = self._random.randrange(1, 50)
        match self._random.choice(_TAGS[:-1]):
            case "Hello":
                return messages.Hello(oldest=number([0, 1, 2, -5]), newest=number([0, 1, 2, 99]), client="x" * small)
            case "OpenDataset":
                return messages.OpenDataset(id=small, digest=number(["", "0" * 32, "no digest"]))
            case "FollowPlan":
                return messages.FollowPlan(id=small, num_accesses=number([0, 1, 2, 3, *_NUMBERS[:9]]), clock=small)
            case "Advance":
                return messages.Advance(clock=number(_NUMBERS[:7]))
            case "Acquire":
                return messages.Acquire(id=small, shard=number([0, 1, 2, *_NUMBERS[:9]]))
            case "Release":
                return messages.Release(shard=number([0, 1, 2, *_NUMBERS[:9]]))
            case "Report":
                waits = [number([0.0, 1.5, -1.0, float("nan"), float("inf"), 1e308]) for _ in range(small)]
                return messages.Report(fetch_seconds=waits, samples=number(_NUMBERS[:7]))
            case _:
                return messages.GetStatus(id=small)

    def _hasty_request(self) -> messages.Request:
        small = self._random.randrange(1, 2**62)
        match self._random.randrange(20):
            case 0:
                return messages.GetStatus(id=small)
            case 1 | 2:
                return messages.FollowPlan(id=small, num_accesses=self._random.randrange(4), clock=small % 100)
            case 3:
                return messages.Report(fetch_seconds=[0.0, float("nan")], samples=small % 7 - 1)
            case 4 | 5 | 6 | 7:
                return messages.Advance(clock=self._random.choice(_NUMBERS[:2] + _NUMBERS[3:10]))
            case _:
                return messages.Acquire(id=small, shard=self._random.randrange(4))

    def _own_fd(self, request: messages.Request) -> tuple[str, ...]:
        return ("plan",) if isinstance(request, messages.FollowPlan) else ()

    def _fds(self, request: messages.Request) -> tuple[str, ...]:
        takes_one = isinstance(request, messages.OpenDataset | messages.FollowPlan)
        if self._random.random() < (0.75 if takes_one else 0.95):
            return (self._random.choice(KINDS),) if takes_one else ()
        return tuple(self._random.choices(KINDS, k=self._random.randrange(0, 4)))

    def _truncated(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def _extended(self, data: bytes) -> bytes:
        return data + self._random.randbytes(self._random.randrange(1, 64))

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.randrange(1, 5)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _retyped(self, data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        name = self._random.choice(list(fields))
        fields[name] = self._anything()
        return msgspec.msgpack.encode(fields)

    def _without_a_field(self, data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        del fields[self._random.choice(list(fields))]
        return msgspec.msgpack.encode(fields)

    def _with_another_field(self, data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        fields[self._random.choice(["fd", "path", "__class__", "", "type "])] = self._anything()
        return msgspec.msgpack.encode(fields)

    def _with_another_tag(self, data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        fields["type"] = self._random.choice(_TAGS + _REPLIES)
        return msgspec.msgpack.encode(fields)

    def _repeated_field(self, data: bytes) -> bytes:
        body = data[1:]
        return bytes([0x80 | min(15, 2 * (data[0] & 0x0F))]) + body + body

    def _spliced(self, data: bytes) -> bytes:
        other = frames.encode(self._request())
        return data[: self._random.randrange(len(data))] + other[self._random.randrange(len(other)) :]

    def _with_a_huge_length(self, data: bytes) -> bytes:
        head = self._random.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\xdc", b"\xde"])
        length = struct.pack(">I", self._random.choice([2**32 - 1, 2**31, 2**24, 65536]))
        at = self._random.randrange(len(data))
        return data[:at] + head + length + data[at:]

    def _nested(self, _: bytes) -> bytes:
        return self._random.choice([b"\x91", b"\x81\xa0", b"\x92\xc0"]) * self._random.choice([10, 1000, 20_000])

    def _noise(self, _: bytes) -> bytes:
        return self._random.randbytes(self._random.randrange(1, 200))

    def _oversized(self, _: bytes) -> bytes:
        size_bytes = self._random.choice([fdpass.MAX_MESSAGE_BYTES, fdpass.MAX_MESSAGE_BYTES + 1, 150_000])
        whole = frames.encode(messages.Hello(oldest=1, newest=1, client=""))[:-1]
        return whole + b"\xdb" + struct.pack(">I", size_bytes) + b"x" * (size_bytes - len(whole) - 5)

    def _anything(self) -> Any:
        pick = self._random.choice
        return pick([
            None, True, pick(_NUMBERS[:13]), -1.5, float("nan"), "", "x" * 300, b"\xff\xfe", [], [1, "a"],
            {}, {"a": {"b": [None]}}, [[]] * 5, msgspec.msgpack.Ext(1, b"x"),
        ])  # fmt: skip


KINDS = (
    "plan", "plan of garbage", "spec", "spec of garbage", "unsealed", "half sealed", "empty", "sparse", "null device",
    "pipe", "folder", "socket", "read only file",
)  # fmt: skip
