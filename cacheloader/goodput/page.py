"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Any

from cacheloader.goodput import charts
from cacheloader.goodput.report import duration
from cacheloader.goodput.screen import TITLES, no_failure_yet

if TYPE_CHECKING:
    from cacheloader.goodput.account import Account

STYLE = """
:root { color-scheme: light dark; --ground: #fbfbf9; --card: #ffffff; --ink: #1d2326; --soft: #626c72; --line: #dfe3e2;
  --kept_compute: #2f8f5b; --provisional: #9bcfae; --exposed_fetch: #e08a1e; --checkpoint: #3b7dd8;
  --straggler_wait: #d9b92f; --hang: #c43c2c; --lost_work: #8e2f3c; --detection: #e07fa5; --spin_wait: #b0559d;
  --restart: #7460c4; --init: #ab9fe0; --gap: #8b9297; --eval: #2aa5a0; --other: #c3c9c8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181a; --card: #1c2225; --ink: #e6eae9; --soft: #98a3a8;
  --line: #323a3e; --kept_compute: #46b377; --provisional: #2f6247; --exposed_fetch: #f0a344; --checkpoint: #6aa3f0;
  --straggler_wait: #e5cb55; --hang: #e8604f; --lost_work: #b84a59; --detection: #ec9aba; --spin_wait: #c874b6;
  --restart: #9584dd; --init: #6a5fa3; --gap: #6d757a; --eval: #45c2bc; --other: #4b5356; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 0 0 8px; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 14px 20px; }
.numbers b { display: block; font-size: 26px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 13px; }
.first { border-left: 5px solid var(--exposed_fetch); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); } svg .axis { stroke: var(--line); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 10px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; } td, th { padding: 4px 10px 4px 0; vertical-align: top; }
td.n, th.n { text-align: right; } tr + tr td { border-top: 1px solid var(--line); }
.wide { overflow-x: auto; }
"""


def page(account: Account, found: dict[str, Any]) -> str:
    """The page.

    Args:
        account: For the timeline.
        found: The report of the same account.
    """
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found["start"]))
    parts = [
        f"<h1>Run {escape(found['run'])}</h1>",
        f'<p class="soft">{"under way" if found["is_live"] else "over"}, begun {begun}, '
        f"{duration(found['wall_s'])} on {found['devices']} devices, {len(found['attempts'])} attempts</p>",
        _section("", _numbers(found)),
        f'<section class="first"><h2>First thing to do</h2><p>{escape(found["first"])}</p></section>',
        _section("Where the paid device time went", charts.waterfall(found) + _legend(found)),
        _section("When", charts.timeline(account, found) + _legend(found)),
        _failures(found),
        _checkpoints(found),
        _section("Waiting for a batch, by epoch", charts.fetch(found)) if found["fetch"] else "",
        _stragglers(found),
        _attempts(found),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Goodput of {escape(found['run'])}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section>{head}<div class="wide">{content}</div></section>'


def _numbers(found: dict[str, Any]) -> str:
    rows = [
        (f"{found['goodput_time']:.1%}", "goodput: kept computing in the paid time"),
        (f"{found['kept_step_share']:.1%}", "kept steps, with their waiting"),
        (f"{found['goodput_work']:.1%}", f"work, against uninterrupted steps of {duration(found['reference_step_s'])}"),
    ]
    if found["last_hour"] is not None:
        rows.append((f"{found['last_hour']:.1%}", "goodput of the last hour"))
    if found["tokens"]["issued"]:
        rows.append((_count(found["useful_tokens_per_hour"]), "useful tokens an hour"))
    elif found["samples"]["issued"]:
        rows.append((_count(found["useful_samples_per_hour"]), "useful samples an hour"))
    rows.append((f"{found['committed_step']:,}", "last step that is safe"))
    rows.append((str(len(found["failures"])), "failure" if len(found["failures"]) == 1 else "failures"))
    cells = "".join(f"<div><b>{value}</b><span>{escape(text)}</span></div>" for value, text in rows)
    return f'<div class="numbers">{cells}</div>'


def _count(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):,.1f} {unit}"
    return f"{value:,.0f}"


def _legend(found: dict[str, Any]) -> str:
    rows = [
        f'<span><i style="background:var(--{label})"></i>{TITLES[label]}</span>'
        for label, amount in found["device_ns"].items()
        if amount
    ]
    return f'<div class="legend">{"".join(rows)}</div>'


def _table(head: list[str], rows: list[list[str]], *, numbers_from: int) -> str:
    def cells(row: list[str], kind: str) -> str:
        return "".join(
            f'<{kind} class="n">{value}</{kind}>' if i >= numbers_from else f"<{kind}>{value}</{kind}>"
            for i, value in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _failures(found: dict[str, Any]) -> str:
    if not found["failures"]:
        return ""
    rows = [
        [
            time.strftime("%H:%M:%S", time.gmtime(failure["at"])),
            str(failure["rank"]) if failure["rank"] >= 0 else "?",
            escape(failure["cause"][:90]),
            duration(failure["lost_device_s"]),
            duration(failure["recovery_s"]),
        ]
        for failure in found["failures"]
    ]
    table = _table(["when", "rank", "what", "work lost (device time)", "time to recover"], rows, numbers_from=3)
    return _section("Failures", table + charts.recovery(found))


def _checkpoints(found: dict[str, Any]) -> str:
    advice = found["advice"]
    if advice is None:
        return ""
    if not advice["num_failures"]:
        told = "".join(f"<p>{escape(line.strip().capitalize())}.</p>" for line in no_failure_yet(advice))
        return _section("How often to save", told)
    low, best, high = (duration(value) for value in advice["mtbf_s"])
    short, advised, long = (duration(value) for value in advice["interval_s"])
    now = f"Now every {duration(advice['current_s'])}" if advice["current_s"] else "Only one so far"
    goodput = "" if advice["goodput_now"] is None else f", {advice['goodput_now']:.1%} expected goodput"
    return _section(
        "How often to save",
        f"<p><b>{escape(advice['verdict'].capitalize())}.</b> {now}{goodput}; "
        f"advised every {advised} (90 %: {short} to {long}), {advice['goodput_best']:.1%} expected.</p>"
        f'<p class="soft">A save stalls {duration(advice["cost_s"])} and is durable after '
        f"{duration(advice['lag_s'])}; a restart takes {duration(advice['restart_s'])}; failures come "
        f"every {best} (90 %: {low} to {high}, from {advice['num_failures']}). "
        f"Young {duration(advice['young_s'])}, Daly {duration(advice['daly_s'])}, exact "
        f"{duration(advice['exact_s'])}.</p>",
    )


def _stragglers(found: dict[str, Any]) -> str:
    if not found["stragglers"]["steps"]:
        return ""
    told = "".join(f"<p>{escape(text)}</p>" for text in found["stragglers"]["sentences"]) or "<p>Nobody stands out.</p>"
    rows = [
        [
            escape(entry["op"]),
            f"{entry['count']:,}",
            duration(entry["p50_s"]),
            duration(entry["p99_s"]),
            duration(entry["max_s"]),
            str(entry["top"][0][0]) if entry["top"] else "",
        ]
        for entry in found["collectives"]
    ]
    head = ["inside a collective", "calls", "p50", "p99", "longest", "in step"]
    table = _table(head, rows, numbers_from=1) if rows else ""
    return _section("Who was waited for", told + charts.stragglers(found) + table)


def _attempts(found: dict[str, Any]) -> str:
    rows = [
        [
            escape(attempt["name"]),
            escape(attempt["end"][:80]),
            str(attempt["world"]),
            f"{attempt['first_step']:,} to {attempt['last_step']:,}" if attempt["last_step"] else "none",
            duration((attempt["end_ns"] - attempt["start_ns"]) / 1e9),
        ]
        for attempt in found["attempts"]
    ]
    return _section("Attempts", _table(["attempt", "end", "ranks", "steps", "duration"], rows, numbers_from=2))
