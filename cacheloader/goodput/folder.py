"""Reads the event files of a run's folder; a second reading reads only what is new."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError
from cacheloader.goodput.events import decode

if TYPE_CHECKING:
    from pathlib import Path

    from cacheloader.goodput.events import Event


@dataclass(slots=True)
class EventFolder:
    """The files below one folder, and how far each has been read.

    Attributes:
        path: The folder.
        damaged: Lines that are no events, as ``file:line: why``.
    """

    path: Path
    damaged: list[str] = field(default_factory=list)
    _offsets: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def read(self) -> list[Event]:
        """What was written since the last call; a last line without an end is left for the next.

        Raises:
            ConfigError: There are no event files, or such of a newer cacheloader.
        """
        paths = sorted(self.path.rglob("events-*.jsonl"))
        if not paths:
            raise ConfigError(
                f"{self.path} holds no goodput events (events-*.jsonl); pass the folder that cl.goodput.Run was given"
            )
        found: list[Event] = []
        for path in paths:
            self._read(path, found)
        return found

    def _read(self, path: Path, found: list[Event]) -> None:
        offset, number = self._offsets.get(path, (0, 0))
        if path.stat().st_size <= offset:
            return
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                number += 1
                if line == b"\n":
                    continue
                try:
                    event = decode(line, where=f"{path}:{number}")
                except ConfigError:
                    raise
                except ValueError as error:
                    self.damaged.append(f"{path.name}:{number}: {error}")
                    continue
                if event is not None:
                    found.append(event)
        self._offsets[path] = (offset, number)
