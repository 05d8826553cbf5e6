"""``python -m benchmarks.hedging``: shards from a store with a heavy tail, with second requests and without.

A real SeaweedFS behind a proxy that makes every answer wait for a time drawn from a seed: lognormal, so that the 99th
of a hundred takes about ten times as long as the middle one. Both ways fetch the same shard in turn, in one process,
as four ranges. Printed: how long that took, and how often was asked twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.findings import Findings, add_options
from benchmarks.harness.statistics import percentile
from cacheloader.origin.base import ObjectInfo
from cacheloader.origin.open import open_origin
from cacheloader.origin.slots import TransferSlots
from cacheloader.origin.transfer import TransferLimits, transfer
from tests.support.fault_proxy import FaultProxy
from tests.support.seaweedfs import SeaweedServer, storage_options

if TYPE_CHECKING:
    from collections.abc import Callable

SHARES = (0.0, 0.05)
PART_BYTES = 16 * 1024
RANGES = 4
SMALL_SHARDS = 10
WARM_UP = 20
"""Shards before it counts: what is late has to be known first."""


def lognormal(rng: random.Random, typical_s: float) -> Callable[[], float]:
    """Waits around ``typical_s``, of which one in a hundred takes ten times as long."""
    return lambda: typical_s * rng.lognormvariate(0.0, 1.0)


async def measure(
    url: str, info: ObjectInfo, proxy: FaultProxy, *, shards: int, seed: int, typical_s: float
) -> list[dict[str, Any]]:
    """Fetch the shard again and again, one way and the other in turn; what both took."""
    origin = open_origin(info.uri, storage_options=storage_options(url))
    limits = TransferLimits(part_bytes=PART_BYTES)
    ways = {share: TransferSlots(hedge_share=share) for share in SHARES}
    seconds: dict[float, list[float]] = {share: [] for share in SHARES}
    waits = {share: lognormal(random.Random(seed), typical_s) for share in SHARES}
    clock = asyncio.get_running_loop().time

    async def write_at(_offset: int, _body: Any) -> None:
        return None

    try:
        for number in range(WARM_UP + shards):
            for share, slots in ways.items():
                proxy.latency_of = waits[share]
                began_s = clock()
                await transfer(origin, info, write_at, limits=limits, slots=slots)
                if number >= WARM_UP:
                    seconds[share].append(clock() - began_s)
    finally:
        await origin.aclose()
    figures = []
    for share, slots in ways.items():
        found = slots.hedges.statistics()
        took = [1000 * value for value in seconds[share]]
        figures.append(
            {
                "second_requests_up_to": share,
                "p50_ms": percentile(took, 50),
                "p95_ms": percentile(took, 95),
                "p99_ms": percentile(took, 99),
                "longest_ms": max(took),
                "ranges": found.requests,
                "asked_twice": found.hedges,
                "answered_first": found.won,
            }
        )
    return figures


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hedging", description=__doc__)
    parser.add_argument("--shards", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--typical", type=float, default=0.05, help="seconds that half of all answers take at most")
    add_options(parser)
    options = parser.parse_args()
    shards = SMALL_SHARDS if options.small else options.shards
    with tempfile.TemporaryDirectory(prefix="hedging-") as folder:
        server = SeaweedServer(Path(folder))
        server.start()
        proxy = FaultProxy(server.port)
        proxy.start()
        try:
            client = server.client()
            client.create_bucket(Bucket="hedging")
            body = random.Random(options.seed).randbytes(RANGES * PART_BYTES)
            put = client.put_object(Bucket="hedging", Key="shard", Body=body)
            info = ObjectInfo(uri="s3://hedging/shard", size_bytes=len(body), version=put["ETag"])
            figures = asyncio.run(
                measure(proxy.url, info, proxy, shards=shards, seed=options.seed, typical_s=options.typical)
            )
        finally:
            proxy.stop()
            server.stop()
    for row in figures:
        print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    says = f"Shards of {RANGES} ranges from a store whose answers wait, lognormal around {options.typical:g} s."
    Findings(theme="hedging", says=says, figures=figures).write(options)


if __name__ == "__main__":
    main()
