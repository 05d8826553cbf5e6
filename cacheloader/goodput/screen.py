"""The report on one screen of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cacheloader.goodput.report import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

BAR = 34

TITLES = {
    "kept_compute": "computing that was kept",
    "provisional": "computing not yet committed",
    "exposed_fetch": "waiting for data",
    "checkpoint": "saving checkpoints",
    "straggler_wait": "waiting for slower ranks",
    "hang": "hung steps",
    "lost_work": "lost work",
    "detection": "failure not yet noticed",
    "spin_wait": "survivors not yet gone",
    "restart": "restarting",
    "init": "first start",
    "gap": "down, or no rank",
    "eval": "evaluation",
    "other": "everything else",
}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The report, line by line."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["start"]))
    state = "under way" if found["is_live"] else "over"
    yield (
        f"run {found['run']}: {state}, begun {begun}, {duration(found['wall_s'])} on {found['devices']} devices, "
        f"{_counted(found['attempts'], 'attempt')}, {_counted(found['failures'], 'failure')}"
    )
    hour = "" if found["last_hour"] is None else f", {found['last_hour']:.1%} in the last hour"
    yield (
        f"goodput {found['goodput_time']:.2%} of the paid time{hour}; kept steps fill {found['kept_step_share']:.2%}; "
        f"work {found['goodput_work']:.2%} of an uninterrupted run ({duration(found['reference_step_s'])} a step)"
    )
    if found["tokens"]["issued"]:
        yield (
            f"tokens {found['tokens']['kept']:,} kept of {found['tokens']['issued']:,} issued, "
            f"{found['useful_tokens_per_hour']:,.0f} useful an hour"
        )
    elif found["samples"]["issued"]:
        yield (
            f"samples {found['samples']['kept']:,} kept of {found['samples']['issued']:,} issued, "
            f"{found['useful_samples_per_hour']:,.0f} useful an hour"
        )
    yield f"first thing to do: {found['first']}"
    yield ""
    yield f"{'where the paid device time went':<{28}} {'device time':>14} {'share':>7}"
    for label, share in found["share"].items():
        if found["device_ns"][label]:
            bar = "█" * max(1, round(BAR * share))
            yield f"  {TITLES[label]:<26} {duration(found['device_s'][label]):>14} {share:>7.2%} {bar}"
    whole = 1.0 if found["paid_device_ns"] else 0.0
    yield f"  {'together, exactly':<26} {duration(found['paid_device_s']):>14} {whole:>7.2%}"
    yield from _failures(found)
    yield from _saves(found)
    if found["stragglers"]["sentences"]:
        yield ""
        yield from found["stragglers"]["sentences"]
    beside = found["interference"]
    if beside["cost_device_s"] is not None:
        yield (
            f"uploads: a step beside one takes {duration(beside['upload_step_s'])}, another "
            f"{duration(beside['clear_step_s'])}; in {beside['upload_steps']} steps that makes "
            f"{beside['cost_device_s']:.1f} device-seconds"
        )
    if found["collectives"]:
        yield ""
        yield f"{'inside a collective':<20} {'calls':>9} {'p50':>10} {'p99':>10} {'longest':>10}"
        for entry in found["collectives"]:
            p50, p99, longest = (duration(entry[key]) for key in ("p50_s", "p99_s", "max_s"))
            at = f"  in step {entry['top'][0][0]}" if entry["top"] else ""
            yield f"  {entry['op']:<18} {entry['count']:>9,} {p50:>10} {p99:>10} {longest:>10}{at}"
    epochs = [entry for entry in found["fetch"] if entry["batches"]]
    if epochs:
        yield ""
        yield f"{'waiting for a batch':<20} {'batches':>9} {'p50':>10} {'p99':>10} {'longest':>10} {'together':>13}"
        for entry in epochs[:3] + epochs[3:][-3:]:
            name = f"epoch {entry['epoch']}" if entry["epoch"] >= 0 else "all epochs"
            p50, p99, longest, total = (duration(entry[key]) for key in ("p50_s", "p99_s", "max_s", "total_s"))
            yield f"  {name:<18} {entry['batches']:>9,} {p50:>10} {p99:>10} {longest:>10} {total:>13}"
    if found["damaged_lines"]:
        yield ""
        yield f"{len(found['damaged_lines'])} lines could not be read, the first: {found['damaged_lines'][0]}"


def _failures(found: dict[str, Any]) -> Iterator[str]:
    failures = found["failures"]
    if not failures:
        return
    yield ""
    lost_h = sum(f["lost_device_s"] for f in failures) / 3600 / len(failures)
    yield f"failures ({lost_h:.3g} device hours of work lost by each, on average)"
    for failure in failures[-5:]:
        stages = ", ".join(f"{name} {duration(amount)}" for name, amount in failure["stages"])
        where = f"rank {failure['rank']}" if failure["rank"] >= 0 else "some rank"
        back = f"back after {duration(failure['recovery_s'])}: {stages}" if stages else "not back"
        yield f"  {time.strftime('%H:%M:%S', time.gmtime(failure['at']))} {where}: {failure['cause'][:60]}; {back}"


def _saves(found: dict[str, Any]) -> Iterator[str]:
    advice = found["advice"]
    if advice is None:
        return
    yield ""
    if not advice["num_failures"]:
        yield from no_failure_yet(advice)
        return
    low, best, high = (duration(value) for value in advice["mtbf_s"])
    yield (
        f"checkpoints: a save stalls {duration(advice['cost_s'])} and is durable after {duration(advice['lag_s'])}; "
        f"a restart takes {duration(advice['restart_s'])}; failures come every {best} (90 %: {low} to {high})"
    )
    short, advised, long = (duration(value) for value in advice["interval_s"])
    now = f"now every {duration(advice['current_s'])}, " if advice["current_s"] else ""
    yield (
        f"  {now}advised every {advised} (90 %: {short} to {long}; Young {duration(advice['young_s'])}, "
        f"Daly {duration(advice['daly_s'])}): {advice['verdict']}"
    )


def no_failure_yet(advice: dict[str, Any]) -> Iterator[str]:
    """What is known of saves and failures as long as there was none."""
    lag = f" and is durable after {duration(advice['lag_s'])}" if advice["lag_s"] else ""
    now = f", now every {duration(advice['current_s'])}" if advice["current_s"] else ""
    yield f"checkpoints: a save stalls {duration(advice['cost_s'])}{lag}{now}"
    yield (
        f"  no failure was seen yet: in all likelihood (95 %) they come no more often than every "
        f"{duration(advice['mtbf_s'][0])}, and to save more often than every {duration(advice['interval_s'][0])} "
        "does not pay"
    )


def _counted(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
