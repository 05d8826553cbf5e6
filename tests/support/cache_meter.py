"""How much a cache directory takes on disk, watched while something else runs."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path


def disk_bytes(directory: Path) -> int:
    """What ``du`` would say of one instant: allocated blocks of every file below ``directory``, each counted once.

    A look takes its time, in which one shard may make room for another that is found in its turn, so that only files
    count that are there in two looks, one behind the other: they were all there between the two.
    """
    before, after = _files(directory), _files(directory)
    return sum(
        min(size, after[key][0]) for key, (size, names) in before.items() if key in after and names & after[key][1]
    )


def _files(directory: Path) -> dict[tuple[int, int], tuple[int, set[str]]]:
    """Bytes of each file and what of its names a publication keeps: another that gets its number is another file."""
    seen: dict[tuple[int, int], tuple[int, set[str]]] = {}
    stack = [str(directory)]
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except FileNotFoundError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
                    continue
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # it was evicted or renamed while we looked
            names = seen.get((status.st_dev, status.st_ino), (0, set()))[1]
            names.add(entry.name.removeprefix(".").partition(".")[0])
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512, names
    return seen


class CacheMeter:
    """Samples ``disk_bytes`` in a thread, as fast as it can, as a context manager.

    Attributes:
        peak_bytes: Largest value seen.
        num_looks: How often it looked.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0
        self.num_looks = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, disk_bytes(self._directory))
            self.num_looks += 1
            if self._stop.wait(0.002):
                return
