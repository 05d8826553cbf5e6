"""Prometheus text, family by family.

No label names a shard, a path or a rank: the number of series stays the same for every data set.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheloader_daemon.account import HistogramRecord

Labels = tuple[tuple[str, str], ...]


class MetricsText:
    """Builds one exposition, family by family."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: set[str] = set()

    def gauge(self, name: str, help_text: str, value: float | Mapping[Labels, float]) -> None:
        """A family whose values go up and down."""
        self._family(name, "gauge", help_text, value)

    def counter(self, name: str, help_text: str, value: float | Mapping[Labels, float]) -> None:
        """A family whose values only rise; ``name`` ends in ``_total``."""
        self._family(name, "counter", help_text, value)

    def histogram(self, name: str, help_text: str, record: HistogramRecord) -> None:
        """A histogram without labels."""
        self._head(name, "histogram", help_text)
        below = 0
        for edge, count in zip((*record.edges, float("inf")), record.counts, strict=True):
            below += count
            self._lines.append(f'{name}_bucket{{le="{_number(edge)}"}} {below}')
        self._lines.append(f"{name}_sum {_number(record.total)}")
        self._lines.append(f"{name}_count {below}")

    def text(self) -> str:
        """The exposition."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, help_text: str) -> None:
        assert name not in self._names, f"the family {name} stands there already, and a scraper would refuse both"
        self._names.add(name)
        self._lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]

    def _family(self, name: str, kind: str, help_text: str, value: float | Mapping[Labels, float]) -> None:
        self._head(name, kind, help_text)
        rows: Mapping[Labels, float] = {(): value} if isinstance(value, int | float) else value
        for labels, number in rows.items():
            pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            self._lines.append(f"{name}{{{pairs}}} {_number(number)}" if pairs else f"{name} {_number(number)}")


def by(label: str, values: Mapping[str, float]) -> dict[Labels, float]:
    """``values`` as one series for each key, told apart by ``label``."""
    return {((label, key),): value for key, value in sorted(values.items())}


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
