"""The account as metrics, for Prometheus' textfile collector: for clusters where nothing may be scraped.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from typing import Any


def text(found: dict[str, Any]) -> str:
    """The exposition of one run's report."""
    run = _escaped(found["run"])
    rows: list[str] = []

    def family(name: str, kind: str, meaning: str, values: list[tuple[str, float]]) -> None:
        rows.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
        rows.extend(f'{name}{{run="{run}"{labels}}} {value!r}' for labels, value in values)

    family(
        "training_device_seconds",
        "gauge",
        "Paid device time, by what became of it. Lost work moves from one to the other, so it is no counter.",
        [(f',category="{label}"', value) for label, value in found["device_s"].items()],
    )
    windows = [(',window="run"', found["goodput_time"])]
    if found["last_hour"] is not None:
        windows.append((',window="1h"', found["last_hour"]))
    family("training_goodput_ratio", "gauge", "Kept computing as a part of the paid time.", windows)
    family("training_work_goodput_ratio", "gauge", "Kept work as a part of an uninterrupted run.", [("", found["goodput_work"])])  # noqa: E501  # fmt: skip
    family(
        "training_tokens",
        "gauge",
        "Tokens; the kept ones fall with a rollback.",
        [(f',state="{state}"', float(value)) for state, value in found["tokens"].items()],
    )
    causes = [(',cause="failure"', sum(f["lost_device_s"] for f in found["failures"]))]
    causes.append((',cause="rollback"', found["rollback_device_s"]))
    family("training_lost_device_seconds", "gauge", "Device time of work that was undone.", causes)
    family("training_failures", "gauge", "Attempts that did not end by themselves.", [("", float(len(found["failures"])))])  # noqa: E501  # fmt: skip
    stages: dict[str, float] = {}
    for failure in found["failures"]:
        for name, amount in failure["stages"]:
            stages[name] = stages.get(name, 0.0) + amount
    family("training_recovery_seconds_sum", "gauge", "Time to recover, by stage.", [(f',stage="{_escaped(n)}"', v) for n, v in stages.items()])  # noqa: E501  # fmt: skip
    committed = [save["end_ns"] for save in found["saves"] if save["is_committed"]]
    family("training_last_commit_timestamp_seconds", "gauge", "When the last checkpoint became durable.", [("", max(committed) / 1e9)] if committed else [])  # noqa: E501  # fmt: skip
    family("training_last_commit_step", "gauge", "The last step that is safe.", [("", float(found["committed_step"]))])
    saves = found["saves"]
    parts = [(',stage="stall"', sum(save["stall_ns"] for save in saves) / 1e9)]
    parts.append((',stage="commit"', sum(max(0, save["lag_ns"] - save["stall_ns"]) for save in saves if save["lag_ns"] is not None) / 1e9))  # noqa: E501  # fmt: skip
    if found["interference"]["cost_device_s"] is not None:
        family("training_checkpoint_interference_device_seconds", "gauge", "What steps beside uploads took longer.", [("", found["interference"]["cost_device_s"])])  # noqa: E501  # fmt: skip
    family("training_checkpoint_seconds", "gauge", "Sum over saves: stall of the slowest rank, and from there to durable.", parts)  # noqa: E501  # fmt: skip
    family("training_jitter_device_seconds", "gauge", "What clear steps took beyond their rank's median.", [("", found["interference"]["jitter_device_s"])])  # noqa: E501  # fmt: skip
    tails = [(f',op="{_escaped(e["op"])}",quantile="{q}"', e[key]) for e in found["collectives"] for q, key in (("0.5", "p50_s"), ("0.99", "p99_s"), ("1", "max_s"))]  # noqa: E501  # fmt: skip
    family("training_collective_seconds", "gauge", "Time inside collectives, by kind; quantiles to 4.4 %.", tails)
    slowest = max((rank["caused_wait_s"] for rank in found["ranks"]), default=0.0)
    family("training_straggler_wait_seconds", "gauge", "Device time spent waiting for slower ranks.", [("", found["device_s"]["straggler_wait"])])  # noqa: E501  # fmt: skip
    family("training_slowest_rank_wait_seconds", "gauge", "The part of it that the worst rank caused.", [("", slowest)])
    busy = [r["kept_compute_s"] for r in found["ranks"] if r["kept_compute_s"]]
    if busy:
        median = sorted(busy)[(len(busy) - 1) // 2]
        family("training_slowest_rank_ratio", "gauge", "Kept computing of the slowest rank against the median rank's.", [("", max(busy) / median)])  # noqa: E501  # fmt: skip
    return "\n".join(rows) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
