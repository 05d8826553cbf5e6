"""OpenTelemetry: base units in seconds, with bucket edges that suit them (the default ones suit milliseconds)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheloader.goodput.export.batched import Batched

if TYPE_CHECKING:
    from cacheloader.goodput.export.batched import Row

EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OpenTelemetry(Batched):
    """Records through a meter provider.

    Args:
        provider: A ``MeterProvider``; else the global one.
        every: Steps between two flushes of what is no histogram.
    """

    def __init__(self, provider: Any = None, *, every: int = 20) -> None:
        super().__init__(every=every)
        self._provider = provider
        self._ratio = 0.0

    def open(self) -> None:
        """Make the instruments."""
        from opentelemetry import metrics

        provider = self._provider or metrics.get_meter_provider()
        meter = provider.get_meter("cacheloader.goodput")
        self._fetch: Any = meter.create_histogram(
            "cacheloader.fetch.duration",
            unit="s",
            description="Wait for a batch.",
            explicit_bucket_boundaries_advisory=EDGES_S,
        )
        self._stall: Any = meter.create_counter("cacheloader.stall.duration", unit="s", description="Exposed waits.")
        self._tokens: Any = meter.create_counter("training.tokens", unit="{token}", description="Tokens issued.")
        self._goodput: Any = meter.create_gauge("training.goodput.ratio", unit="1", description="Kept computing.")
        self._time: Any = meter.create_gauge("training.device.share", unit="1", description="Of the paid time.")

    def step(self, step: int, dur_s: float, fetch_s: float, tokens: int, samples: int) -> None:
        """A step is complete."""
        if not self._is_broken:
            self._guarded(lambda: self._record(fetch_s, tokens))
        super().step(step, dur_s, fetch_s, tokens, samples)

    def send(self, row: Row) -> None:
        """The provider reads by itself."""

    def summary(self, numbers: dict[str, float]) -> None:
        """The account."""
        self._goodput.set(numbers["goodput/ratio"], {"run": self.started.run})
        for name, value in numbers.items():
            if name.startswith("goodput/share/"):
                category = name.rpartition("/")[2]
                self._time.set(value, {"run": self.started.run, "category": category})

    def close(self) -> None:
        """Flush, since the process may end at once."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            flush()

    def _record(self, fetch_s: float, tokens: int) -> None:
        attributes = {"run": self.started.run}
        self._fetch.record(fetch_s, attributes)
        self._stall.add(fetch_s, attributes)
        self._tokens.add(tokens, attributes)
