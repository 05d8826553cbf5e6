"""The targets that the benchmark is held against. Scenarios say which of their comparisons answers which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One target.

    Attributes:
        key: What ``Comparison.goal`` names, and what ``reasons.toml`` explains.
        says: The target in a sentence; the bound itself is that of the comparisons.
        theme: Scenario that measures it.
    """

    key: str
    says: str
    theme: str


GOALS = (
    Goal(key="cold-engine", theme="two-epochs", says="cold epoch: part of what parallel ranged GETs to files reach"),
    Goal(key="cold-peers", theme="two-epochs", says="cold epoch: times the best peer, 2 workers"),
    Goal(key="mount-cold", theme="volume", says="cold epoch from a slow mount: times the stock loader"),
    Goal(key="warm-pread", theme="two-epochs", says="warm epoch: part of what `os.pread` reaches in as many processes"),
    Goal(key="warm-peers-0", theme="two-epochs", says="warm epoch of raw bytes, 0 workers: times the best peer"),
    Goal(key="warm-peers-2", theme="two-epochs", says="warm epoch of raw bytes, 2 workers: times the best peer"),
    Goal(
        key="decode",
        theme="decode",
        says="warm epoch with JPEG decoding, which leaves the CPU no time: part of a bare decoding loop",
    ),
    Goal(key="mount-warm", theme="volume", says="second epoch of a slow mount: times the stock loader"),
    Goal(key="small-samples", theme="small-samples", says="warm samples of 1 kB in one process: samples/s"),
    Goal(key="stall-cold", theme="stall", says="steps longer than their data, cold: waiting after the first batch"),
    Goal(key="stall-warm", theme="stall", says="steps longer than their data, warm: waiting"),
    Goal(key="fetch-p99", theme="stall", says="the same, warm: 99th percentile of `fetch_seconds`, ms"),
    Goal(key="first-batch-cold", theme="two-epochs", says="first batch, cold: times the GET of the first window"),
    Goal(key="first-batch-warm", theme="two-epochs", says="first batch, warm, workers up: seconds"),
    Goal(key="sharing", theme="sharing", says="2 ranks of 8 workers, cold: bytes from the store, times the data set"),
    Goal(key="cpu-cold", theme="two-epochs", says="CPU s/GB of client and daemon, cold: part of the lowest peer's"),
    Goal(key="cpu-warm", theme="two-epochs", says="CPU s/GB of client and daemon, warm: part of the lowest peer's"),
    Goal(
        key="rss", theme="two-epochs", says="memory of client, one worker and daemon, warm: part of the lowest peer's"
    ),
    Goal(key="rss-worker", theme="decode", says="memory of a worker, warm, with decoding: part of the lowest peer's"),
    Goal(key="scale", theme="scale", says="growth of what each batch costs with shards and samples: exponent"),
)
