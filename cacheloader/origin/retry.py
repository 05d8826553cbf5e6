"""When to ask again, and how fast: arithmetic only. Time and chance are passed in."""

from __future__ import annotations

import msgspec

from cacheloader.errors import ConfigError


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential backoff with full jitter.

    Full jitter spreads the nodes of a job, which all failed at the same moment, over the whole wait.
    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Attributes:
        first_s: Longest wait after the first failure.
        factor: Growth of the longest wait with each further failure, 1 or more.
        longest_s: Where the growth ends.
    """

    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 15.0

    def __post_init__(self) -> None:
        if not (0 <= self.first_s <= self.longest_s and self.factor >= 1):
            raise ConfigError(
                f"first_s={self.first_s}, factor={self.factor}, longest_s={self.longest_s} is no backoff; "
                "it needs 0 <= first_s <= longest_s and factor >= 1"
            )

    def ceiling_s(self, failures: int) -> float:
        """The longest wait after ``failures`` failures in a row (1 or more)."""
        # 64 doublings pass any longest_s; a larger exponent would overflow.
        return min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 64))

    def delay_s(self, failures: int, unit: float) -> float:
        """The wait after ``failures`` failures in a row.

        Args:
            failures: 1 or more.
            unit: A random number in [0, 1).
        """
        return self.ceiling_s(failures) * unit


class HostPace(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests one host lets us have at a time: half after a "slow down", then one more a round.

    Attributes:
        most: Requests at a time that are never exceeded.
        allowed: Requests at a time that are allowed now, in [1, ``most``].
        resume_s: No request starts before this time.
        strikes: "Slow down" answers since the last success, those to requests of one burst counted once.
        last_cut_s: When ``allowed`` was last halved.
    """

    most: int
    allowed: float
    resume_s: float = 0.0
    strikes: int = 0
    last_cut_s: float = float("-inf")

    @classmethod
    def open(cls, most: int) -> HostPace:
        """The pace of a host that nothing is known of yet."""
        return cls(most=most, allowed=float(most))

    def may_start(self, *, in_flight: int, now_s: float) -> bool:
        """Whether one more request may start."""
        return now_s >= self.resume_s and in_flight + 1 <= self.allowed

    def throttled(self, *, width: int, started_s: float, now_s: float, unit: float, backoff: Backoff) -> HostPace:
        """The pace after a "slow down".

        Args:
            width: Requests at a time that were worth having, of which half are left.
            started_s: When the request started. One that started before the last cut tells nothing new: it was sent
                at the old pace.
            now_s: When the answer came.
            unit: A random number in [0, 1).
            backoff: How long the host is left alone.
        """
        if started_s < self.last_cut_s:
            return self
        strikes = self.strikes + 1
        return msgspec.structs.replace(
            self,
            allowed=max(1.0, min(self.allowed, width) / 2),
            resume_s=max(self.resume_s, now_s + backoff.delay_s(strikes, unit)),
            strikes=strikes,
            last_cut_s=now_s,
        )

    def succeeded(self, *, started_s: float) -> HostPace:
        """The pace after a request that started at ``started_s`` was answered well."""
        if started_s < self.last_cut_s or (self.allowed == self.most and not self.strikes):
            return self
        return msgspec.structs.replace(self, allowed=min(float(self.most), self.allowed + 1 / self.allowed), strikes=0)
