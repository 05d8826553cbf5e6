"""The page's charts, as SVG. Colours are the page's variables, named like the categories."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheloader.goodput.categories import Category
from cacheloader.goodput.report import FETCH_EDGES_S, duration
from cacheloader.goodput.screen import TITLES

if TYPE_CHECKING:
    from cacheloader.goodput.account import Account, Segments

WIDTH = 1000
COLUMNS = 250
MAX_STRIPS = 16
MAX_EPOCHS = 4


def waterfall(found: dict[str, Any]) -> str:
    """From all that was paid, loss by loss, down to what was kept."""
    losses = [
        (label, share)
        for label, share in found["share"].items()
        if share and label not in ("kept_compute", "provisional")
    ]
    losses.sort(key=lambda pair: -pair[1])
    rows = [("paid for", "other", 0.0, 1.0, duration(found["paid_device_s"]))]
    left = 1.0
    for label, share in losses:
        rows.append((TITLES[label], label, left - share, share, duration(found["device_s"][label])))
        left -= share
    rows += [
        (
            TITLES[label],
            label,
            max(0.0, left - share) if label == "provisional" else 0.0,
            share,
            duration(found["device_s"][label]),
        )
        for label, share in ((name, found["share"][name]) for name in ("provisional", "kept_compute"))
        if share
    ]
    left_px, scale, height = 210, 560, 24
    parts = []
    for i, (title, label, start, share, amount) in enumerate(rows):
        y = i * height
        parts.append(
            f'<text x="{left_px - 10}" y="{y + 16}" text-anchor="end">{escape(title)}</text>'
            f'<rect x="{left_px + scale * start:.1f}" y="{y + 4}" width="{max(1.0, scale * share):.1f}" '
            f'height="16" rx="2" '
            f'fill="var(--{label})"><title>{escape(title)}: {share:.2%}</title></rect>'
            f'<text x="{left_px + scale + 12}" y="{y + 16}" class="soft">{share:.2%} · {amount}</text>'
        )
    return _svg(len(rows) * height + 4, "".join(parts), "Shares of the paid device time")


def timeline(account: Account, found: dict[str, Any]) -> str:
    """Shares over the run's time, attempts, and one strip for each rank."""
    if account.wall_ns <= 0:
        return "<p>Nothing yet.</p>"
    left_px, width, high = 72, WIDTH - 82, 120
    edges = np.linspace(account.start_ns, account.end_ns, COLUMNS + 1)
    shares = _shares(account.segments, edges)
    step_px = width / COLUMNS
    parts = []
    base = np.zeros(COLUMNS)
    for category in Category:
        heights = shares[category]
        for begin, stop in _runs(np.round(heights, 3), np.round(base, 3)):
            if heights[begin] > 0:
                parts.append(
                    f'<rect x="{left_px + begin * step_px:.2f}" y="{high * (1 - base[begin] - heights[begin]):.1f}" '
                    f'width="{(stop - begin) * step_px + 0.3:.2f}" height="{high * heights[begin]:.1f}" '
                    f'fill="var(--{category.label})"/>'
                )
        base = base + heights
    y = high + 8
    for attempt in account.attempts:
        x = left_px + width * (attempt.start_ns - account.start_ns) / account.wall_ns
        x2 = left_px + width * (min(attempt.end_ns, account.end_ns) - account.start_ns) / account.wall_ns
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(1.5, x2 - x - 1):.1f}" height="5" rx="2" fill="var(--soft)">'
            f"<title>{escape(attempt.name)}: {escape(attempt.end)}</title></rect>"
        )
    for save in account.saves:
        if save.is_committed and save.end_ns is not None:
            x = left_px + width * (save.end_ns - account.start_ns) / account.wall_ns
            parts.append(
                f'<path d="M{x:.1f} {y + 8}l3 5h-6z" fill="var(--checkpoint)"><title>{escape(save.ckpt)}</title></path>'
            )
    parts.append(f'<text x="{left_px - 8}" y="{y + 9}" text-anchor="end" class="soft">attempts</text>')
    y += 20
    devices = sorted(set(account.segments.device.tolist()))
    strip = 14
    for device in devices[:MAX_STRIPS]:
        own = _shares(account.segments.of_device(device), edges)
        table = np.stack([own[category] for category in Category])
        best = np.where(table.sum(axis=0) > 0, table.argmax(axis=0), -1)
        parts.append(f'<text x="{left_px - 8}" y="{y + 11}" text-anchor="end" class="soft">rank {device}</text>')
        for begin, stop in _runs(best):
            if best[begin] >= 0:
                parts.append(
                    f'<rect x="{left_px + begin * step_px:.2f}" y="{y}" width="{(stop - begin) * step_px + 0.2:.2f}" '
                    f'height="{strip - 3}" fill="var(--{Category(best[begin]).label})"/>'
                )
        y += strip
    if len(devices) > MAX_STRIPS:
        parts.append(f'<text x="{left_px}" y="{y + 11}" class="soft">and {len(devices) - MAX_STRIPS} more ranks</text>')
        y += strip
    for i in range(6):
        x = left_px + width * i / 5
        anchor = "start" if i == 0 else "end" if i == 5 else "middle"
        text = duration(found["wall_s"] * i / 5) if i else "0"
        parts.append(f'<text x="{x:.0f}" y="{y + 16}" text-anchor="{anchor}" class="soft">{text}</text>')
    return _svg(y + 22, "".join(parts), "What the devices did over the run's time")


def recovery(found: dict[str, Any]) -> str:
    """The stages of each recovery, one bar a failure."""
    failures = [failure for failure in found["failures"] if failure["stages"]][-12:]
    if not failures:
        return ""
    longest = max(failure["recovery_s"] for failure in failures)
    names = list(dict.fromkeys(name for failure in failures for name, _ in failure["stages"]))
    colours = {name: _STAGES.get(name, _SPARE[i % len(_SPARE)]) for i, name in enumerate(names)}
    parts, height = [], 22
    for i, failure in enumerate(failures):
        x, scale = 70.0, (WIDTH - 190) / longest
        parts.append(f'<text x="60" y="{i * height + 15}" text-anchor="end" class="soft">rank {failure["rank"]}</text>')
        for name, amount in failure["stages"]:
            parts.append(
                f'<rect x="{x:.1f}" y="{i * height + 3}" width="{max(0.5, amount * scale):.1f}" height="15" '
                f'fill="var(--{colours[name]})"><title>{escape(name)}: {duration(amount)}</title></rect>'
            )
            x += amount * scale
        parts.append(
            f'<text x="{x + 8:.1f}" y="{i * height + 15}" class="soft">{duration(failure["recovery_s"])}</text>'
        )
    keys = "".join(f'<span><i style="background:var(--{colours[name]})"></i>{escape(name)}</span>' for name in names)
    return (
        '<p class="soft" style="margin-top:14px">From the death to the first new step:</p>'
        + _svg(len(failures) * height + 4, "".join(parts), "Stages of recovery")
        + f'<div class="legend">{keys}</div>'
    )


def fetch(found: dict[str, Any]) -> str:
    """How long the loop waited for its batches, one histogram an epoch."""
    entries = found["fetch"]
    if len(entries) > MAX_EPOCHS:
        entries = [*entries[:2], *entries[-(MAX_EPOCHS - 2) :]]
    width, high, gap = WIDTH / len(entries), 96, 26
    parts = []
    bins = len(FETCH_EDGES_S) + 1
    for i, entry in enumerate(entries):
        most = max(entry["counts"]) or 1
        bar = (width - gap) / bins
        x0 = i * width + 4
        name = f"epoch {entry['epoch']}" if entry["epoch"] >= 0 else "all batches"
        parts.append(f'<text x="{x0:.0f}" y="14">{name}</text>')
        parts.append(
            f'<text x="{x0:.0f}" y="30" class="soft">{entry["batches"]:,} batches, p50 {duration(entry["p50_s"])}, '
            f"p99 {duration(entry['p99_s'])}</text>"
        )
        for b, count in enumerate(entry["counts"]):
            if count:
                h = max(1.5, high * count / most)
                low = "0" if b == 0 else duration(FETCH_EDGES_S[b - 1])
                top = duration(FETCH_EDGES_S[b]) if b < len(FETCH_EDGES_S) else "more"
                parts.append(
                    f'<rect x="{x0 + b * bar:.1f}" y="{38 + high - h:.1f}" width="{max(1, bar - 2):.1f}" '
                    f'height="{h:.1f}" '
                    f'fill="var(--exposed_fetch)"><title>{low} to {top}: {count:,}</title></rect>'
                )
        parts.append(f'<line class="axis" x1="{x0}" x2="{x0 + width - gap:.0f}" y1="{38 + high}" y2="{38 + high}"/>')
        ticks = (
            ((1, "0.1 ms"), (5, "10 ms"), (9, "1 s"), (13, "100 s"))
            if len(entries) < 4
            else ((1, "0.1 ms"), (9, "1 s"))
        )
        for b, text in ticks:
            parts.append(
                f'<text x="{x0 + b * bar:.0f}" y="{38 + high + 16}" class="soft" text-anchor="middle">{text}</text>'
            )
    return _svg(38 + high + 22, "".join(parts), "Histogram of waiting times")


def stragglers(found: dict[str, Any]) -> str:
    """For each rank, how long the others waited for it, and how much of that its own fetch explains."""
    ranks = sorted(found["ranks"], key=lambda rank: -rank["caused_wait_s"])[:MAX_STRIPS]
    longest = max((rank["caused_wait_s"] for rank in ranks), default=0.0)
    if not longest:
        return ""
    parts, height = [], 22
    for i, rank in enumerate(sorted(ranks, key=lambda rank: rank["rank"])):
        y, scale = i * height, (WIDTH - 420) / longest
        whole, part = rank["caused_wait_s"] * scale, min(rank["caused_by_fetch_s"], rank["caused_wait_s"]) * scale
        share = rank["last_in_steps"] / found["stragglers"]["steps"]
        parts.append(
            f'<text x="60" y="{y + 15}" text-anchor="end">rank {rank["rank"]}</text>'
            f'<rect x="70" y="{y + 3}" width="{part:.1f}" height="15" fill="var(--exposed_fetch)"/>'
            f'<rect x="{70 + part:.1f}" y="{y + 3}" width="{max(0.0, whole - part):.1f}" height="15" '
            f'fill="var(--straggler_wait)"/>'
            f'<text x="{78 + whole:.1f}" y="{y + 15}" class="soft">'
            f"{duration(rank['caused_wait_s'])} of the others' time, last in {share:.0%} of steps</text>"
        )
    keys = (
        '<span><i style="background:var(--exposed_fetch)"></i>its own waiting for data</span>'
        '<span><i style="background:var(--straggler_wait)"></i>its computing</span>'
    )
    return _svg(len(ranks) * height + 4, "".join(parts), "Who was waited for") + f'<div class="legend">{keys}</div>'


_STAGES = {
    "detection": "detection",
    "spin": "spin_wait",
    "relaunch": "gap",
    "down": "gap",
    "launch": "other",
    "imports": "init",
    "setup": "restart",
    "ckpt_read": "checkpoint",
    "loader_restore": "eval",
    "first batch": "exposed_fetch",
    "first step": "kept_compute",
}
_SPARE = ("restart", "straggler_wait", "eval", "provisional", "hang")


def _svg(height: float, content: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _shares(segments: Segments, edges: np.ndarray) -> dict[Category, np.ndarray]:
    """Of each column between ``edges``, the part that each category fills."""
    spent = {category: _spent(segments, category, edges) for category in Category}
    total = sum(spent.values())
    return {
        category: np.divide(amount, total, out=np.zeros(len(edges) - 1), where=total > 0)
        for category, amount in spent.items()
    }


def _spent(segments: Segments, category: Category, edges: np.ndarray) -> np.ndarray:
    chosen = segments.category == category
    starts, ends = np.sort(segments.start_ns[chosen]), np.sort(segments.end_ns[chosen])
    # Time spent before t is the sum over segments of min(t, end) - min(t, start).
    return np.diff(_below(ends, edges) - _below(starts, edges))


def _below(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum over ``values`` of min(edge, value), for each edge; relative to the first edge, for the sake of precision."""
    shifted = (values - int(edges[0])).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(shifted)))
    at = edges - edges[0]
    count = np.searchsorted(shifted, at)
    found: np.ndarray = sums[count] + (len(shifted) - count) * at
    return found


def _runs(*columns: np.ndarray) -> list[tuple[int, int]]:
    """Neighbouring columns that are equal, as half-open ranges."""
    size = len(columns[0])
    changes = [0] + [i for i in range(1, size) if any(c[i] != c[i - 1] for c in columns)] + [size]
    return [(a, b) for a, b in pairwise(changes) if b > a]
