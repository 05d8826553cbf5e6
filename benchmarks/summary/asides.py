"""What was measured without a target: what an interruption costs, what a second job reads, a cache below the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

THEMES = ("node", "idle", "fetch-cost", "recovery", "checkpoint", "position")
PRESSURE = "pressure-bytes"


def asides(contents: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Theme, what was measured, and the figure, of the reports of one call."""
    for theme in THEMES:
        for ratio in contents.get(theme, {}).get("ratios", ()):
            if not ratio.get("goal"):
                figure = f"{ratio['median']:.3g} [{ratio['least']:.3g}–{ratio['most']:.3g}]"
                yield theme, f"{ratio['name']} ({ratio['figure']})", figure
    for one in contents.get(PRESSURE, {}).get("bytes", ()):
        size = one["dataset_bytes"]
        figure = f"{one['bytes_per_epoch'] / size:.3f} of the data set"
        if one["case"]["num_jobs"] == 1:
            figure += f"; no policy goes below {one['least_bytes'] / size:.3f}"
        share = one["cached_bytes"] / size
        yield PRESSURE, f"{one['case']['name']}, a cache of {share:.0%}: bytes from the store an epoch", figure
