"""How many requests at a time are worth having with one host: arithmetic only. Time is passed in.

Requests that are in flight together share the link. Once it is full, one more brings no byte sooner: it delays the
shard that somebody waits for, and holds memory that the processor's cache then no longer covers.
"""

from __future__ import annotations

import msgspec

FIRST_REQUESTS = 8
"""What a shard of 64 MiB has ranges of 8 MiB: the first one that somebody waits for goes out at once, and alone."""

LEAST_GAIN = 1.25
"""By how much twice the requests have to raise the rate to be kept: between nothing, on a link that is full, and twice
as much, on one where each connection has a bound of its own. A guess."""

HELD_ROUNDS = 32
"""Rounds until the next look whether more requests would bring more now. One round in so many, at twice the width, is
what looking costs."""


class WidthSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search by doubling. A round is as many answers as requests are allowed at a time.

    Attributes:
        most: Requests at a time that are never exceeded.
        allowed: Requests at a time that are allowed now, in [1, ``most``].
        rate: Bytes a second at half of ``allowed``, 0 if nothing is known.
        held_rounds: Rounds for which ``allowed`` stays as it is.
        began_s: When the round began; ``None`` before the first answer.
        answers: Answers in this round.
        size_bytes: Their bytes.
    """

    most: int
    allowed: int
    rate: float = 0.0
    held_rounds: int = 0
    began_s: float | None = None
    answers: int = 0
    size_bytes: int = 0

    @classmethod
    def open(cls, most: int) -> WidthSearch:
        """For a host that nothing is known of yet."""
        return cls(most=most, allowed=min(most, FIRST_REQUESTS))

    def answered(self, *, in_flight: int, size_bytes: int, now_s: float) -> WidthSearch:
        """After a good answer.

        Args:
            in_flight: Requests at that moment, this one included. Fewer than allowed: nobody wanted more, so the round
                says nothing.
            size_bytes: What came.
            now_s: When.
        """
        if in_flight < self.allowed:
            return msgspec.structs.replace(self, began_s=None, answers=0, size_bytes=0)
        if self.began_s is None:
            return msgspec.structs.replace(self, began_s=now_s, answers=0, size_bytes=0)
        answers, total_bytes = self.answers + 1, self.size_bytes + size_bytes
        if answers < self.allowed or now_s <= self.began_s:
            return msgspec.structs.replace(self, answers=answers, size_bytes=total_bytes)
        ended = msgspec.structs.replace(self, began_s=now_s, answers=0, size_bytes=0)
        return ended._next_round(total_bytes / (now_s - self.began_s))

    def _next_round(self, rate: float) -> WidthSearch:
        if self.held_rounds > 1:
            return msgspec.structs.replace(self, held_rounds=self.held_rounds - 1)
        is_trial = self.rate > 0 and not self.held_rounds
        if is_trial and rate < LEAST_GAIN * self.rate:
            return msgspec.structs.replace(self, allowed=max(1, self.allowed // 2), rate=0.0, held_rounds=HELD_ROUNDS)
        wider = min(self.most, 2 * self.allowed)
        if wider == self.allowed:
            return msgspec.structs.replace(self, rate=0.0, held_rounds=HELD_ROUNDS)
        return msgspec.structs.replace(self, allowed=wider, rate=rate, held_rounds=0)
