"""The report: an account in seconds and shares, with advice, as plain values for the screen, the page and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader.goodput.advisor import Advice, advise
from cacheloader.goodput.categories import Category
from cacheloader.goodput.interference import interference

if TYPE_CHECKING:
    from cacheloader.goodput.account import Account

FETCH_EDGES_S = tuple(10 ** (i / 2 - 4) for i in range(13))
"""From 0.1 ms to 100 s, two a decade."""


def report(account: Account, *, name: str, damaged: list[str], is_live: bool) -> dict[str, Any]:
    """Everything that there is to say.

    Args:
        account: Of the whole run.
        name: Of the run.
        damaged: Lines that could not be read.
        is_live: Whether the run goes on.
    """
    paid_s = account.paid_ns / 1e9
    totals = {category.label: account.totals[category] / 1e9 for category in Category}
    advice = advice_of(account)
    return {
        "run": name,
        "is_live": is_live,
        "start": account.start_ns / 1e9,
        "wall_s": account.wall_ns / 1e9,
        "paid_device_s": paid_s,
        "devices": account.widths[-1][2] if account.widths else 0,
        "device_s": totals,
        "device_ns": {category.label: account.totals[category] for category in Category},
        "paid_device_ns": account.paid_ns,
        "share": {label: value / paid_s if paid_s else 0.0 for label, value in totals.items()},
        "goodput_time": account.goodput_time,
        "goodput_work": account.goodput_work,
        "kept_step_share": account.kept_share,
        "reference_step_s": account.reference_step_ns / 1e9,
        "committed_step": account.committed,
        "tokens": {"issued": account.steps.tokens_issued, "kept": account.steps.tokens_kept},
        "samples": {"issued": account.steps.samples_issued, "kept": account.steps.samples_kept},
        "useful_tokens_per_hour": account.useful_tokens_per_hour,
        "useful_samples_per_hour": account.useful_samples_per_hour,
        "stages": _stages(account),
        "attempts": [asdict(attempt) for attempt in account.attempts],
        "failures": [_failure(failure) for failure in account.failures],
        "rollback_device_s": account.undone.rollback_ns / 1e9,
        "saves": [asdict(save) | {"lag_ns": save.lag_ns} for save in account.saves],
        "restores": [
            {"step": step, "ckpt": ckpt, "skipped": [list(pair) for pair in skipped]}
            for step, ckpt, skipped in account.restores
        ],
        "last_hour": _last_hour(account),
        "ranks": _ranks(account),
        "stragglers": _stragglers(account),
        "collectives": _collectives(account),
        "interference": _interference(account),
        "fetch": _fetch(account),
        "advice": None if advice is None else _finite(asdict(advice)),
        "damaged_lines": damaged,
        "first": first_thing(account, advice),
    }


def advice_of(account: Account) -> Advice | None:
    """How often to save, if a save was ever timed."""
    timed = [save for save in account.saves if save.stall_ns]
    if not timed or account.wall_ns <= 0:
        return None
    lags = [save.lag_ns for save in timed if save.lag_ns is not None]
    recoveries = [f.recovery_ns for f in account.failures if f.recovery_ns is not None]
    begins = sorted(save.begin_ns for save in account.saves)
    gaps = [b - a for a, b in pairwise(begins)]
    return advise(
        cost_s=sum(save.stall_ns for save in timed) / len(timed) / 1e9,
        lag_s=sum(lags) / len(lags) / 1e9 if lags else 0.0,
        restart_s=sum(recoveries) / len(recoveries) / 1e9 if recoveries else 0.0,
        num_failures=len(account.failures),
        exposure_s=account.wall_ns / 1e9,
        current_s=float(np.median(gaps)) / 1e9 if gaps else 0.0,
    )


def first_thing(account: Account, advice: Advice | None) -> str:
    """What to do first: the largest loss, and what helps against it."""
    if not account.paid_ns:
        return "nothing was recorded yet"
    if not account.saves and not account.committed and account.totals[Category.PROVISIONAL]:
        return (
            "no commit of a checkpoint was recorded, so nothing counts as kept: save with cl.Checkpointer, or call "
            "goodput.recorder.ckpt_commit when a checkpoint is durable"
        )
    losses = {c: account.totals[c] for c in Category if c not in (Category.COMPUTE, Category.PROVISIONAL)}
    worst = max(losses, key=lambda category: losses[category])
    share = losses[worst] / account.paid_ns
    if share < 0.01:
        return "nothing costs as much as 1 % of the paid time: leave it as it is"
    return f"{worst.label.replace('_', ' ')} costs {share:.1%} of the paid time: {_remedy(account, worst, advice)}"


def _remedy(account: Account, worst: Category, advice: Advice | None) -> str:
    match worst:
        case Category.FETCH:
            return "warm the cache before the job, add loader workers, or look at the origin (cacheloader status)"
        case Category.CKPT:
            return _interval(advice) or "save asynchronously"
        case Category.LOST:
            if not account.failures:
                return "rollbacks gave it up: look for what made the loss go astray"
            return _interval(advice) or "save more often"
        case Category.STRAGGLER:
            if not account.arrivals.last:
                return "find out which rank is late"
            notable = account.arrivals.standing_out()
            if not notable:
                return "the ranks are late by turns and none stands out: even out batches, or the noise of the nodes"
            return _lateness(account, notable[0])
        case Category.HANG:
            return "look at the ranks that hung (stragglers), and set a shorter timeout of the process group"
        case Category.DETECT:
            return "shorten the timeout of the process group, so that a dead rank is noticed earlier"
        case Category.SPIN:
            return "end the survivors sooner: a shorter timeout, or torchrun's monitor interval"
        case Category.RESTART | Category.INIT:
            stages = {label: ns for (category, label), ns in _by_label(account).items() if category == worst}
            name, amount = max(stages.items(), key=lambda item: item[1])
            return f"{name} takes most of it ({amount / sum(stages.values()):.0%})"
        case Category.GAP:
            return "the job waited to be started again, or devices had no rank: restart within the allocation"
        case Category.EVAL:
            return "evaluate less often, or on fewer samples"
        case _:
            return "name the code between the steps with run.phase(…) to see what it is"


def _interval(advice: Advice | None) -> str:
    if advice is None:
        return ""
    now = f", now {duration(advice.current_s)}" if advice.current_s else ""
    if not advice.num_failures:
        if advice.verdict != "save less often":
            return ""
        shortest = duration(advice.interval_s[0])
        return f"no failure was seen yet, and saving more often than every {shortest} does not pay{now}"
    return f"{advice.verdict} (advised: every {duration(advice.interval_s[1])}{now})"


def _lateness(account: Account, rank: int) -> str:
    arrivals = account.arrivals
    share = arrivals.last[rank] / arrivals.num_steps
    return f"rank {rank} is last in {share:.0%} of the steps{_cause(account, rank)}"


def _cause(account: Account, rank: int) -> str:
    arrivals = account.arrivals
    caused = arrivals.caused_ns[rank]
    if not caused or arrivals.fetch_ns[rank] < caused / 2:
        return ": its computing is slow"
    sources = arrivals.sources.get(rank)
    return ", because it waits for data" + (f" ({sources.most_common(1)[0][0]})" if sources else "")


def duration(seconds: float | None) -> str:
    """For a person: ``12.3 s``, ``4 min 05 s``, ``2 h 10 min``, ``3.1 d``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds >= 1e-4 or not seconds else "< 0.1 ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{seconds / 86400:.1f} d"


def _by_label(account: Account) -> dict[tuple[Category, str], int]:
    segments = account.segments
    found: dict[tuple[Category, str], int] = {}
    for category in Category:
        is_mine = segments.category == category
        for label in np.unique(segments.label[is_mine]).tolist():
            found[category, account.labels[label]] = segments.total(is_mine & (segments.label == label))
    return found


def _stages(account: Account) -> list[dict[str, Any]]:
    return [
        {"category": category.label, "stage": label, "device_s": amount / 1e9}
        for (category, label), amount in _by_label(account).items()
    ]


def _failure(failure: Any) -> dict[str, Any]:
    return {
        "attempt": failure.attempt,
        "at": failure.at_ns / 1e9,
        "cause": failure.cause,
        "rank": failure.rank,
        "lost_device_s": failure.lost_ns / 1e9,
        "detection_device_s": failure.detect_ns / 1e9,
        "spin_device_s": failure.spin_ns / 1e9,
        "recovery_s": None if failure.recovery_ns is None else failure.recovery_ns / 1e9,
        "stages": [[name, amount / 1e9] for name, amount in failure.stages],
    }


def _last_hour(account: Account) -> float | None:
    start_ns = account.end_ns - 3600 * 10**9
    if start_ns <= account.start_ns:
        return None
    paid_ns = account.paid_in(start_ns, account.end_ns)
    return account.window(start_ns, account.end_ns)[Category.COMPUTE] / paid_ns if paid_ns else None


def _ranks(account: Account) -> list[dict[str, Any]]:
    found = []
    by_device = account.segments.totals_by_device()
    for device in range(max((width for _, _, width in account.widths), default=0)):
        totals = by_device.get(device, dict.fromkeys(Category, 0))
        arrivals = account.arrivals
        found.append(
            {
                "rank": device,
                "kept_compute_s": totals[Category.COMPUTE] / 1e9,
                "exposed_fetch_s": totals[Category.FETCH] / 1e9,
                "straggler_wait_s": totals[Category.STRAGGLER] / 1e9,
                "last_in_steps": arrivals.last[device],
                "caused_wait_s": arrivals.caused_ns[device] / 1e9,
                "caused_by_fetch_s": arrivals.fetch_ns[device] / 1e9,
                "waited_for": [list(pair) for pair in arrivals.sources.get(device, {}).items()][:5],
            }
        )
    return found


def _stragglers(account: Account) -> dict[str, Any]:
    arrivals = account.arrivals
    sentences = [_lateness(account, rank) for rank in arrivals.standing_out()[:3]]
    return {"steps": arrivals.num_steps, "notable_steps": arrivals.num_notable, "sentences": sentences}


def _collectives(account: Account) -> list[dict[str, Any]]:
    """By kind: quantiles to 4.4 %, and the longest ones exactly, with their steps."""
    return [
        {
            "op": op,
            "count": tail.count,
            "p50_s": tail.quantile(0.5),
            "p99_s": tail.quantile(0.99),
            "max_s": tail.top[0][1] if tail.top else 0.0,
            "top": [list(pair) for pair in tail.top],
        }
        for op, tail in sorted(account.collectives.items())
    ]


def _interference(account: Account) -> dict[str, Any]:
    """Steps beside an upload against the others; ``None`` where there were too few."""
    found = interference(account)
    return {
        "upload_steps": found.during_steps,
        "clear_steps": found.clear_steps,
        "upload_step_s": found.during_ns / 1e9 if found.is_known else None,
        "clear_step_s": found.clear_ns / 1e9 if found.is_known else None,
        "cost_device_s": found.cost_ns / 1e9 if found.is_known else None,
        "jitter_device_s": found.jitter_ns / 1e9,
    }


def _fetch(account: Account) -> list[dict[str, Any]]:
    """Waiting times of all batches, by epoch: counts in the buckets of ``FETCH_EDGES_S``, and quantiles."""
    by_epoch: dict[int, list[np.ndarray]] = {}
    for _, paint in account.steps.rows:
        epochs, fetch_ns = paint.table.column(9), paint.table.column(5)
        for epoch in np.unique(epochs).tolist():
            by_epoch.setdefault(epoch, []).append(fetch_ns[epochs == epoch])
    found = []
    for epoch, parts in sorted(by_epoch.items()):
        seconds = np.concatenate(parts) / 1e9
        counts = np.bincount(np.searchsorted(FETCH_EDGES_S, seconds), minlength=len(FETCH_EDGES_S) + 1)
        found.append(
            {
                "epoch": epoch,
                "batches": len(seconds),
                "counts": counts.tolist(),
                "p50_s": float(np.quantile(seconds, 0.5)),
                "p99_s": float(np.quantile(seconds, 0.99)),
                "max_s": float(seconds.max()),
                "total_s": float(seconds.sum()),
            }
        )
    return found


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
