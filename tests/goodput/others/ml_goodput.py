"""What ml-goodput-measurement says to events: a list of [event, seconds, step] on stdin, its answer on stdout, as JSON.

Run by an interpreter of an environment of its own, where that package is installed; see ``test_other_accounts.py``.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from typing import Any

from ml_goodput_measurement.src import goodput


class Entries:
    """Stands in for Google's log service: keeps entries in memory."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.times: list[float] = []
        self.job_start_time = None

    def write_cloud_logging_entry(self, entry: Any) -> None:
        self.entries.append(entry)
        self.times.append(max(value for key, value in entry.items() if key.endswith("_time")))

    def flush(self) -> None:
        pass

    def read_cloud_logging_entries(
        self, start_time: Any = None, end_time: Any = None, last_entry_info: Any = None
    ) -> Any:
        low = start_time.timestamp() if start_time else float("-inf")
        high = end_time.timestamp() if end_time else float("inf")
        found = [e for e, t in zip(self.entries, self.times, strict=True) if low <= t <= high]
        last = datetime.datetime.fromtimestamp(max(self.times), datetime.UTC)
        return found, (last, str(len(self.entries)))


def main() -> None:
    question = json.load(sys.stdin)
    now = datetime.datetime.now(datetime.UTC)
    origin = now - datetime.timedelta(seconds=question["until"])
    entries = Entries()
    recorder = goodput.GoodputRecorder("job", "log", logging_enabled=True, cloud_logger=entries)
    for event, seconds, *rest in question["events"]:
        at = origin + datetime.timedelta(seconds=seconds)
        getattr(recorder, f"record_{event}_time")(*rest, at)
    with tempfile.TemporaryDirectory() as folder:
        calculator = goodput.GoodputCalculator("job", "log", cloud_logger=entries, cache_dir=folder)
        if "window" in question:
            a, b = (origin + datetime.timedelta(seconds=s) for s in question["window"])
            answer = calculator.get_job_goodput_interval(a, b)
        else:
            answer = calculator.get_job_goodput(include_badput_breakdown=True)
    badput = {getattr(kind, "name", str(kind)): share for kind, share in answer[1].items() if isinstance(share, float)}
    print(json.dumps({"goodput": answer[0], "badput": badput}))


if __name__ == "__main__":
    main()
