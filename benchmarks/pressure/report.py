"""The report: one line a case, beside what no policy can beat and what the simulator says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.pressure.measuring import Outcome

INTRODUCTION = """# A cache smaller than the data

A real SeaweedFS behind a link that counts (and throttles), a real daemon, `cl.DataLoader(RemoteDataset)` without
workers, reshuffled every epoch. All figures are averages over all epochs but the first, as parts of the data set's
bytes (*D*) or of the time without waiting. *Least* is what no policy can go below for one job: (1 - c) D, with c what
the cache could hold by what shards really took in it. *Allowed* is 1.03 times least and window. The simulator had the
same sizes and paces and ran the same planner. Second requests for late ranges
(`hedge_share`) are off unless a row says otherwise: what they ask for again is no decision of the cache.
"""


def write(
    folder: Path, *, name: str, surroundings: dict[str, Any], bytes_of: Sequence[Outcome], stalls: Sequence[Outcome]
) -> list[Path]:
    """Write ``name.md`` and ``name.json``; returns where."""
    document = {
        "environment": surroundings,
        "bytes": [outcome.to_dict() for outcome in bytes_of],
        "stalls": [outcome.to_dict() for outcome in stalls],
    }
    lines = [
        INTRODUCTION,
        *(_bytes_section(bytes_of) if bytes_of else ()),
        *(_stall_section(stalls) if stalls else ()),
        f"Machine: {surroundings['cpu_model']}, {surroundings['cores']} cores; load before and after: "
        f"{surroundings['load_before']} and {surroundings['load_after']}; commit {surroundings['commit']}.",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text("\n".join(lines))
    paths[1].write_text(json.dumps(document, indent=1) + "\n")
    return paths


def _bytes_section(bytes_of: Sequence[Outcome]) -> list[str]:
    return [
        "## Bytes from the store per epoch",
        "",
        "| case | c | least | window / cache | allowed | measured | × least | hit rate | simulated | sim. / measured |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_bytes_row(outcome) for outcome in bytes_of),
        "",
    ]


def _stall_section(stalls: Sequence[Outcome]) -> list[str]:
    return [
        "## Waiting where the link is the limit",
        "",
        "b is the link's bandwidth as a part of what the job takes without waiting. Waiting is seconds of waiting for "
        "each second of computing, in the bound, max(0, (1 - c) / b - 1), and in what was measured. A step computes by "
        "sleeping. All rows ran at the same time, each with a daemon, a cache and a link of its own; nothing is "
        "subtracted, and the job with all in the cache shows what the machine took from each of them. In the first "
        "epoch, which does not count, the links were not throttled. Slow answers: one in fifty waits for 5 or 10 s "
        "before its first byte, the others for 0.1 s; in the simulator it waits for 7.5 s.",
        "",
        "| case | c | b | least waiting | measured | more time than the least possible | simulated | bytes / D |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_stall_row(outcome) for outcome in stalls),
        "",
    ]


def allowed_bytes(outcome: Outcome) -> float:
    """1.03 times the least and the window."""
    return 1.03 * (outcome.least_bytes + outcome.window_bytes)


def _bytes_row(outcome: Outcome) -> str:
    size, case = outcome.dataset_bytes, outcome.case
    is_planned = case.eviction == "plan" and case.num_jobs == 1
    cells = [
        case.name,
        f"{outcome.cached_bytes / size:.3f}",
        f"{outcome.least_bytes / size:.3f}" if case.num_jobs == 1 else "–",
        f"{outcome.window_bytes / outcome.cached_bytes:.1%}" if case.eviction == "plan" else "–",
        f"{allowed_bytes(outcome) / size:.3f}" if is_planned else "–",
        f"{outcome.bytes_per_epoch / size:.3f}",
        f"{outcome.bytes_per_epoch / outcome.least_bytes:.2f}" if case.num_jobs == 1 else "–",
        f"{outcome.hit_rate:.1%}",
        f"{outcome.simulated_bytes / size:.3f}",
        f"{outcome.simulated_bytes / outcome.bytes_per_epoch:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _stall_row(outcome: Outcome) -> str:
    cells = [
        outcome.case.name,
        f"{outcome.cached_bytes / outcome.dataset_bytes:.3f}",
        f"{outcome.case.bandwidth:.2f}",
        f"{outcome.least_stall:.1%}",
        f"{outcome.stall:.1%}",
        f"{(1 + outcome.stall) / (1 + outcome.least_stall) - 1:.1%}",
        f"{outcome.simulated_stall:.1%}",
        f"{outcome.bytes_per_epoch / outcome.dataset_bytes:.3f}",
    ]
    return f"| {' | '.join(cells)} |"
