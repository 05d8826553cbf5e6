"""What a job on this node would cost and wait, beside what no policy could beat."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheloader_daemon.simulator.node import SimulatedNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader_daemon.simulator.node import Moment
    from cacheloader_daemon.simulator.settings import Settings

DAY_S = 86400

NO_STALL = 0.01
"""Waiting of up to this part of the time counts as none: a remedy that ends the last second of it does not exist."""

REMEDIES = 4
"""Cache sizes that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One node, averaged over all epochs but the first of each job.

    Attributes:
        epoch_s: Seconds of an epoch.
        stall: Time spent waiting, as a part of the time without waiting.
        least_stall: What no policy can go below: ``(1 - c) / b - 1`` or 0, for one job; 0 for several.
        first_epoch_s: Seconds of the first epoch, from an empty cache.
        origin_bytes_per_epoch: Read from the origin while each job reads the data set once.
        least_origin_bytes_per_epoch: The least for one job, ``(1 - c)`` of the data set.
        hit_rate: Part of what the jobs read that did not come from the origin for them.
        needed_bytes_per_s: What the origin has to deliver so that nobody waits.
        requests_per_epoch: Fetches begun per epoch of all jobs, second requests included.
        written_bytes_per_day: To the cache's disk, if the job went on for a day.
        window_bytes: Bound of what is fetched ahead.
        kept_bytes: Of the shards that stay from epoch to epoch.
    """

    epoch_s: float
    stall: float
    least_stall: float
    first_epoch_s: float
    origin_bytes_per_epoch: float
    least_origin_bytes_per_epoch: float
    hit_rate: float
    needed_bytes_per_s: float
    requests_per_epoch: float
    written_bytes_per_day: float
    window_bytes: int
    kept_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def forecast(settings: Settings) -> Forecast:
    """Run it."""
    node = SimulatedNode(settings)
    moments = list(node.run())
    start, end = _steady(moments, settings.num_jobs)
    ideal_s = max(job.order.rows_per_epoch for job in node.jobs) * settings.num_ranks / settings.samples_per_s
    job_epochs = [(after - before) for job in node.jobs for before, after in zip(job.ends, job.ends[1:], strict=False)]
    epoch_s = sum(job_epochs) / len(job_epochs)
    # Jobs may run at different paces: what they have read together says how many epochs lie between the two moments.
    read_bytes = end.read_bytes - start.read_bytes
    rounds = read_bytes / (settings.num_jobs * settings.dataset_bytes)
    sent_bytes = end.sent_bytes - start.sent_bytes
    per_epoch_bytes = sent_bytes / rounds
    statistics = node.planner.statistics()
    missing_bytes = (1 - settings.cached_part) * settings.dataset_bytes
    return Forecast(
        epoch_s=epoch_s,
        stall=max(0.0, epoch_s / ideal_s - 1),
        least_stall=least_stall(settings),
        first_epoch_s=max(job.ends[0] for job in node.jobs),
        origin_bytes_per_epoch=per_epoch_bytes,
        least_origin_bytes_per_epoch=missing_bytes,
        hit_rate=1 - sent_bytes / read_bytes,
        needed_bytes_per_s=per_epoch_bytes / ideal_s,
        requests_per_epoch=(end.num_requests - start.num_requests) / rounds,
        written_bytes_per_day=(end.written_bytes - start.written_bytes) / (end.at_s - start.at_s) * DAY_S,
        window_bytes=statistics.lookahead_bytes,
        kept_bytes=statistics.kept_bytes,
    )


def least_stall(settings: Settings) -> float:
    """The least waiting that any policy can reach in later epochs of one job, as a part of the time without it."""
    if settings.num_jobs > 1:
        return 0.0
    return max(0.0, (1 - settings.cached_part) * settings.wanted_bytes_per_s / settings.bandwidth_bytes_per_s - 1)


def enough_cache(settings: Settings, found: Forecast) -> int | None:
    """A cache size with which the jobs would hardly wait; ``None`` if that of the whole data set is not known to do.

    Args:
        settings: What was simulated.
        found: What came out.
    """
    if found.stall <= NO_STALL:
        return settings.cache_bytes
    whole_bytes = settings.dataset_bytes + settings.overhead_bytes
    rate = settings.num_jobs * settings.wanted_bytes_per_s
    # What the link brings in an epoch need not be there; the window is paid for on top.
    missing_bytes = settings.dataset_bytes * min(1.0, settings.bandwidth_bytes_per_s / rate)
    size_bytes = max(settings.cache_bytes, int(whole_bytes - missing_bytes) + found.window_bytes)
    for _ in range(REMEDIES):
        size_bytes = min(size_bytes, whole_bytes)
        if forecast(replace(settings, cache_bytes=size_bytes)).stall <= NO_STALL:
            return size_bytes
        if size_bytes == whole_bytes:
            break
        size_bytes += max(1, (whole_bytes - size_bytes) // 3, settings.dataset_bytes // 20)
    return None


def _steady(moments: Sequence[Moment], num_jobs: int) -> tuple[Moment, Moment]:
    """From when the last job has finished its first epoch until a job finishes its last one."""
    first: dict[int, Moment] = {}
    last: dict[int, Moment] = {}
    for moment in moments:
        first.setdefault(moment.job, moment)
        last[moment.job] = moment
    assert len(first) == num_jobs
    start = max(first.values(), key=lambda moment: moment.at_s)
    end = min(last.values(), key=lambda moment: moment.at_s)
    return (start, end) if end.read_bytes > start.read_bytes else (moments[0], moments[-1])
