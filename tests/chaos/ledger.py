"""What the ranks wrote down, folded: wrong, missing and repeated samples among the steps that were kept.

Shares no code with the package. A step is named by where it ends; the end of an epoch is row 0 of the next. An attempt
takes back every step behind the position that it loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Attributes:
    delivered: Samples that trainers got, those of steps that were taken back included.
    wrong: Of these, the ones whose bytes are not what was written.
    kept: Samples of kept steps.
    missing: Places of finished epochs at which a sample did not come.
    repeated: Samples of kept steps that came more than once in an epoch.
    epochs: Finished epochs.
    """

    delivered: int
    wrong: int
    kept: int
    missing: int
    repeated: int
    epochs: int


def fold(folder: Path, digests: Mapping[str, str]) -> Verdict:
    """The verdict on all logs of a run, as far as they go; a last line that a kill cut is no line."""
    steps: dict[Place, dict[str, list[str]]] = {}
    delivered = wrong = 0
    by_attempt: dict[int, list[tuple[Path, list[dict[str, object]]]]] = {}
    for path in sorted(folder.glob("got-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            by_attempt.setdefault(int(path.stem.split("-")[1]), []).append((path, lines))
    for _, files in sorted(by_attempt.items()):
        loaded = tuple(files[0][1][0]["loaded"])  # type: ignore[arg-type]
        steps = {until: parts for until, parts in steps.items() if until <= loaded}
        for path, lines in files:
            assert tuple(lines[0]["loaded"]) == loaded, f"{path} began elsewhere than its attempt"  # type: ignore[arg-type]
            for line in lines[1:]:
                until = tuple(line["until"])  # type: ignore[arg-type]
                samples: list[tuple[str, str]] = line["samples"]  # type: ignore[assignment]
                delivered += len(samples)
                wrong += sum(digests.get(key) != found for key, found in samples)
                steps.setdefault(until, {})[path.stem] = [key for key, _ in samples]
    epochs: dict[int, Counter[str]] = {}
    for (epoch, row), parts in steps.items():
        counter = epochs.setdefault(epoch if row else epoch - 1, Counter())
        for keys in parts.values():
            counter.update(keys)
    finished = sorted(epochs)[:-1] if not _ends_an_epoch(steps) else sorted(epochs)
    once = Counter(dict.fromkeys(digests, 1))
    return Verdict(
        delivered=delivered,
        wrong=wrong,
        kept=sum(counter.total() for counter in epochs.values()),
        missing=sum((once - epochs[epoch]).total() for epoch in finished),
        repeated=sum((counter - once).total() for counter in epochs.values()),
        epochs=len(finished),
    )


def _ends_an_epoch(steps: Mapping[Place, object]) -> bool:
    return bool(steps) and max(steps)[1] == 0
