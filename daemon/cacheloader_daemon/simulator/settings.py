"""What is simulated: jobs, a cache and an origin, in numbers that a user knows or can measure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = {"float": (int, float), "int": (int,), "bool": (bool,), "str": (str,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One node.

    Attributes:
        num_shards: Of the data set, which all jobs read.
        shard_bytes: Of each.
        reserve_bytes: What is set aside for a shard on its way, which is only then known to take less; 0 for its size.
        samples_per_shard: Of each.
        cache_bytes: The quota.
        overhead_bytes: Of it, what the cache's own index takes.
        samples_per_s: What one job reads if it never waits, on this node.
        bandwidth_bytes_per_s: Of the link, shared by all fetches.
        stream_bytes_per_s: Of one fetch alone; 0 for no such bound.
        latency_s: Median time until the first byte of a fetch.
        latency_sigma: Spread of it (lognormal): 0 for none; 1 for a slowest of a hundred that takes ten medians.
        late_share: Part of the answers that come late, whatever the spread; 0 for none.
        late_s: Time until the first byte of those.
        hedge: Whether a fetch without a first byte at the 95th percentile is asked for again; the first answer wins.
        check_s: From a fetch's last byte until the shard may be read.
        max_fetches: Shards fetched at once.
        lookahead_bytes: Bound of what is fetched ahead; -1 for the planner's own.
        eviction: ``"plan"``, or ``"lru"`` to compare with.
        num_jobs: Jobs with seeds of their own, in step at the start.
        num_ranks: Ranks of each job on this node; each reads its own part of the shards.
        batch_size: Samples that a rank takes at once.
        shuffle_window: Shards that a rank mixes.
        num_epochs: Epochs of each job, from an empty cache on; the first one is not part of the averages.
        seed: Decides orders and latencies.
    """

    num_shards: int
    shard_bytes: int
    samples_per_shard: int
    cache_bytes: int
    overhead_bytes: int = 0
    reserve_bytes: int = 0
    samples_per_s: float
    bandwidth_bytes_per_s: float
    stream_bytes_per_s: float = 0.0
    latency_s: float = 0.03
    latency_sigma: float = 0.0
    late_share: float = 0.0
    late_s: float = 0.0
    hedge: bool = False
    check_s: float = 0.0
    max_fetches: int = 16
    lookahead_bytes: int = -1
    eviction: str = "plan"
    num_jobs: int = 1
    num_ranks: int = 1
    batch_size: int = 64
    shuffle_window: int = 8
    num_epochs: int = 3
    seed: int = 17

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            if kind in KINDS and (not isinstance(value, KINDS[kind]) or (kind != "bool" and isinstance(value, bool))):
                raise ConfigError(f"{field.name}={value!r} is no {kind}")
        for name, smallest in (
            ("num_shards", 1), ("shard_bytes", 1), ("samples_per_shard", 1), ("cache_bytes", 1), ("overhead_bytes", 0),
            ("reserve_bytes", 0),
            ("latency_s", 0), ("latency_sigma", 0), ("late_share", 0), ("late_s", 0), ("check_s", 0),
            ("stream_bytes_per_s", 0), ("max_fetches", 1),
            ("lookahead_bytes", -1), ("num_jobs", 1), ("num_ranks", 1), ("batch_size", 1), ("shuffle_window", 1),
            ("num_epochs", 2),
        ):  # fmt: skip
            if not smallest <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is below {smallest}, or no number")
        if 0 < self.reserve_bytes < self.shard_bytes:
            raise ConfigError(f"reserve_bytes={self.reserve_bytes} is less than a shard of {self.shard_bytes} bytes")
        if self.late_share > 1:
            raise ConfigError(f"late_share={self.late_share} is more than all answers; give a part, up to 1")
        for name in ("samples_per_s", "bandwidth_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is no number above 0")
        if self.num_ranks > self.num_shards:
            raise ConfigError(f"{self.num_ranks} ranks cannot share {self.num_shards} shards; give fewer ranks")
        if self.eviction not in {"plan", "lru"}:
            raise ConfigError(f"eviction={self.eviction!r} is none of plan, lru")

    @property
    def dataset_bytes(self) -> int:
        """All shards."""
        return self.num_shards * self.shard_bytes

    @property
    def wanted_bytes_per_s(self) -> float:
        """What one job reads if it never waits."""
        return self.samples_per_s * self.shard_bytes / self.samples_per_shard

    @property
    def cached_part(self) -> float:
        """The part of the data set that the cache can hold, at most 1."""
        return min(1.0, max(0, self.cache_bytes - self.overhead_bytes) / self.dataset_bytes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings from named values.

        Raises:
            ConfigError: A name is unknown or missing, or a value breaks a rule.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"the simulator does not know {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"a setting is missing: {error}") from error
