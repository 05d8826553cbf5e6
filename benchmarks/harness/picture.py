"""The report as a picture: rates of all contestants, phase by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness.measurement import phase_names
from benchmarks.harness.statistics import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.harness.measurement import Round

OWN = "cacheloader"
_OWN_COLOUR, _CEILING_COLOUR, _OTHER_COLOUR = "#1f6feb", "#9aa4af", "#d98324"


def draw(path: Path, rounds: Sequence[Round], *, title: str) -> bool:
    """Write a PNG: for each phase a bar a contestant, its median, with a whisker from least to most.

    Args:
        path: Of the picture.
        rounds: What was measured.
        title: Above it.

    Returns:
        Whether it was drawn: it is not where matplotlib is missing or nothing was measured.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    names = phase_names(rounds)
    if not names:
        return False
    bars = {name: _bars(rounds, name) for name in names}
    heights = [max(1, len(found)) for found in bars.values()]
    figure = Figure(figsize=(9, 1.2 + 0.32 * sum(heights) + 0.6 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    all_axes = figure.subplots(len(names), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for axes, name in zip(all_axes, names, strict=True):
        found = bars[name][::-1]
        medians = [rate.median for _, rate in found]
        whiskers = [
            [rate.median - rate.least for _, rate in found],
            [rate.most - rate.median for _, rate in found],
        ]
        colours = [_colour(label) for label, _ in found]
        axes.barh([label for label, _ in found], medians, xerr=whiskers, color=colours, error_kw={"linewidth": 0.8})
        axes.set_title(f"{name}, samples/s", fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.margins(y=0.02)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return True


def _bars(rounds: Sequence[Round], name: str) -> list[tuple[str, Spread]]:
    bars = []
    for label in dict.fromkeys(label for one in rounds for label in one.measured):
        runs = [one.measured[label] for one in rounds if label in one.measured]
        phases = [phase for run in runs if (phase := run.phase(name)) is not None]
        if phases:
            bars.append((label, spread([phase.samples_per_s for phase in phases])))
    return bars


def _colour(label: str) -> str:
    if label.startswith(OWN):
        return _OWN_COLOUR
    return _CEILING_COLOUR if label.startswith(("engine", "pread")) else _OTHER_COLOUR
