"""How often to save: from what a save costs, how long it takes to be durable, how long a restart takes and how often
failures come. Pure arithmetic; all times in seconds.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974; J. T. Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, 2006.
"""  # noqa: D205

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIDENCE = 0.9


def young(cost_s: float, mtbf_s: float) -> float:
    """First-order interval: √(2·C·M)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """Higher-order interval; the mean time between failures itself where a save costs twice that."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def exact_goodput(
    interval_s: float, *, cost_s: float, mtbf_s: float, restart_s: float = 0.0, lag_s: float = 0.0
) -> float:
    """Expected share of useful time under failures at random: Δ / (M·e^(R/M)·(e^((Δ+C)/M) − 1)).

    The time until a save is durable adds to what each failure undoes; it acts like a longer restart.
    """
    exponent = (interval_s + cost_s) / mtbf_s
    if exponent > 700 or (restart_s + lag_s) / mtbf_s > 700:
        return 0.0
    cycle_s: float = mtbf_s * math.exp((restart_s + lag_s) / mtbf_s) * math.expm1(exponent)
    share: float = interval_s / cycle_s
    return share


def simple_goodput(
    interval_s: float, *, cost_s: float, mtbf_s: float, restart_s: float = 0.0, lag_s: float = 0.0
) -> float:
    """First order: 1 − C/Δ − (Δ/2 + L + R)/M; too pessimistic where failures are frequent."""
    return 1 - cost_s / interval_s - (interval_s / 2 + lag_s + restart_s) / mtbf_s


def exact_interval(*, cost_s: float, mtbf_s: float) -> float:
    """The interval that maximises ``exact_goodput``, by search; restart and lag do not move it."""
    if cost_s <= 0:
        return 0.0
    low, high = min(1e-6, cost_s / 1e3), 20 * mtbf_s

    def loss(logarithm: float) -> float:
        return -exact_goodput(math.exp(logarithm), cost_s=cost_s, mtbf_s=mtbf_s)

    return math.exp(_minimum(loss, math.log(low), math.log(high)))


def mean_time_between_failures(num_failures: int, exposure_s: float, *, confidence: float = CONFIDENCE) -> tuple[float, float, float]:  # noqa: E501  # fmt: skip
    """(low, best, high) of the mean time between failures that are random in time.

    Without a failure only the low end is known; the best is infinite then.

    Args:
        num_failures: Failures seen.
        exposure_s: Time during which one could have been seen.
        confidence: Probability that the truth lies between low and high.
    """
    tail = (1 - confidence) / 2
    high_rate = _poisson_mean(num_failures, tail)
    low_rate = _poisson_mean(num_failures - 1, 1 - tail) if num_failures else 0.0
    best = exposure_s / num_failures if num_failures else math.inf
    return exposure_s / high_rate, best, exposure_s / low_rate if low_rate else math.inf


def chance_of_any(count: float, probability: float) -> float:
    """Chance that at least one of ``count`` independent things happens, each of this probability: 1 − (1 − p)^n."""
    chance: float = 1 - (1 - probability) ** count
    return chance


def chance_of_failure(num_devices: int, days: float, *, failures_per_device_year: float) -> float:
    """Chance that a job of ``days`` meets a failure, from a measured rate: 1 − e^(−rate·N·days/365)."""
    return -math.expm1(-failures_per_device_year * num_devices * days / 365)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save, and why.

    Attributes:
        cost_s: C, stall of the training threads per save.
        lag_s: L, from a save's begin until it is durable.
        restart_s: R, from a death to the first new step.
        mtbf_s: M: (low, best, high).
        num_failures: What M was estimated from.
        interval_s: What is advised: (for the low M, best, for the high M); without a failure only the first is known,
            and to save more often than that does not pay.
        young_s: First order.
        daly_s: Higher order.
        exact_s: By search in the exact model.
        current_s: The interval now, 0 if unknown.
        goodput_now: Expected with the interval now, ``None`` if unknown.
        goodput_best: Expected with the best, ``None`` without a failure.
        loss_shares: Part of the time that each cause costs at the best interval: ``save``, ``redo``, ``lag``,
            ``restart``; empty without a failure.
        verdict: One sentence.
    """

    cost_s: float
    lag_s: float
    restart_s: float
    mtbf_s: tuple[float, float, float]
    num_failures: int
    interval_s: tuple[float, float, float]
    young_s: float
    daly_s: float
    exact_s: float
    current_s: float
    goodput_now: float | None
    goodput_best: float | None
    loss_shares: dict[str, float]
    verdict: str


def advise(
    *,
    cost_s: float,
    lag_s: float,
    restart_s: float,
    num_failures: int,
    exposure_s: float,
    current_s: float = 0.0,
) -> Advice:
    """Advise an interval.

    Args:
        cost_s: Mean stall per save.
        lag_s: Mean time until a save is durable.
        restart_s: Mean time to recover.
        num_failures: Failures seen.
        exposure_s: Time of the run.
        current_s: Mean time between saves now, 0 if there were not two.

    Raises:
        ConfigError: A number is negative, or nothing was observed at all.
    """
    if min(cost_s, lag_s, restart_s, num_failures, current_s) < 0 or not exposure_s > 0:
        raise ConfigError(
            f"cost {cost_s}, lag {lag_s}, restart {restart_s}, {num_failures} failures in {exposure_s} s: "
            "times cannot be negative, and something has to have been observed"
        )
    low, best, high = mean_time_between_failures(num_failures, exposure_s)
    if not num_failures:
        shortest_s = max(exact_interval(cost_s=cost_s, mtbf_s=low), lag_s, cost_s)
        return Advice(
            cost_s=cost_s, lag_s=lag_s, restart_s=restart_s, mtbf_s=(low, best, high), num_failures=0,
            interval_s=(shortest_s, math.inf, math.inf), young_s=math.inf, daly_s=math.inf, exact_s=math.inf,
            current_s=current_s, goodput_now=None, goodput_best=None, loss_shares={},
            verdict="save less often" if 0 < current_s < shortest_s / 1.5 else "no failure was seen yet",
        )  # fmt: skip
    intervals = [exact_interval(cost_s=cost_s, mtbf_s=m) if m < math.inf else math.inf for m in (low, best, high)]
    # A save that is not durable before the next one begins only queues up.
    floor_s = max(lag_s, cost_s)
    advised = tuple(max(value, floor_s) for value in intervals)
    model = {"cost_s": cost_s, "mtbf_s": best, "restart_s": restart_s, "lag_s": lag_s}
    shares = {
        "save": cost_s / advised[1] if advised[1] else 0.0,
        "redo": advised[1] / 2 / best,
        "lag": lag_s / best,
        "restart": restart_s / best,
    }
    return Advice(
        cost_s=cost_s,
        lag_s=lag_s,
        restart_s=restart_s,
        mtbf_s=(low, best, high),
        num_failures=num_failures,
        interval_s=(advised[0], advised[1], advised[2]),
        young_s=young(cost_s, best),
        daly_s=daly(cost_s, best),
        exact_s=intervals[1],
        current_s=current_s,
        goodput_now=exact_goodput(current_s, **model) if current_s > 0 else None,
        goodput_best=exact_goodput(advised[1], **model) if advised[1] else 1.0,
        loss_shares=shares,
        verdict=_verdict(shares, advised[1], current_s, is_floor=advised[1] == floor_s > intervals[1]),
    )


def _verdict(shares: dict[str, float], advised_s: float, current_s: float, *, is_floor: bool) -> str:
    saving = shares["save"] + shares["redo"]
    if shares["restart"] > saving and shares["restart"] >= shares["lag"]:
        return "the restart dominates: no interval helps, a faster restart does"
    if shares["lag"] > saving or is_floor:
        return (
            "the time until a save is durable dominates: more upload bandwidth or smaller saves help, not more of them"
        )
    if current_s > 0 and current_s > 1.5 * advised_s:
        return "save more often"
    if 0 < current_s < advised_s / 1.5:
        return "save less often"
    return "the interval is about right" if current_s > 0 else "start with this interval"


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where ``function`` is least, by golden section."""
    inverse = (math.sqrt(5) - 1) / 2
    a, b = high - inverse * (high - low), low + inverse * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(200):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - inverse * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + inverse * (high - low)
            at_b = function(b)
    return (low + high) / 2


def _poisson_mean(count: int, probability: float) -> float:
    """The mean at which ``count`` or fewer events have this probability."""
    low, high = 0.0, 10.0 * (count + 5)
    for _ in range(200):
        middle = (low + high) / 2
        if _poisson_below(count, middle) > probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _poisson_below(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(count + 1))
