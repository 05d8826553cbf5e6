"""Reads the event files of a run's folder; a second reading reads only what is new."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError
from cacheloader.goodput.events import RunStart, decode, decode_block
from cacheloader.goodput.places import Place, place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader.goodput.events import Event

BLOCK_BYTES = 2**20
"""So much of a file is decoded at a time."""


@dataclass(slots=True)
class EventFolder:
    """The files below one folder, and how far each has been read.

    Attributes:
        path: The folder, or a URL that fsspec knows.
        damaged: Lines that are no events, as ``file:line: why``.
        runs: The names of runs in each folder with event files, as far as they were read.
        begun: For each folder in which a run began the attempts that began it.
    """

    path: Path | str
    damaged: list[str] = field(default_factory=list)
    runs: dict[str, set[str]] = field(default_factory=dict)
    begun: dict[str, set[str]] = field(default_factory=dict)
    _place: Place = field(init=False)
    _offsets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._place = place(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self._place.name

    def read(self) -> list[Event]:
        """What was written since the last call; a last line without an end is left for the next.

        Raises:
            ConfigError: There are no event files, or such of a newer cacheloader.
        """
        return [event for block in self.blocks() for event in block]

    def blocks(self) -> Iterator[list[Event]]:
        """The same in parts that are small whatever the folder holds; begin again only behind the last one.

        Raises:
            ConfigError: As for ``read``.
        """
        sizes = self._place.sizes()
        if not sizes:
            raise ConfigError(
                f"{self.path} holds no goodput events (events-*.jsonl); pass the folder that cl.goodput.Run was given"
            )
        for path, size_bytes in sizes.items():
            yield from self._blocks(path, size_bytes)

    def _blocks(self, path: str, size_bytes: int) -> Iterator[list[Event]]:
        offset, number = self._offsets.get(path, (0, 0))
        if size_bytes <= offset:
            return
        with self._place.reading(path) as file:
            file.seek(offset)
            rest = b""
            while block := file.read(BLOCK_BYTES):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if not newline:
                    continue
                whole += newline
                found = decode_block(whole)
                if found is None:  # something in it is damaged, unknown or of another version
                    found = self._lines(path, number, whole)
                offset += len(whole)
                number += whole.count(b"\n")
                self._offsets[path] = (offset, number)
                if found:  # a file is of one rank in one attempt
                    parent = str(PurePath(path).parent)
                    self.runs.setdefault(parent, set()).add(found[0].run)
                    if isinstance(found[0], RunStart):
                        self.begun.setdefault(parent, set()).add(found[0].att)
                yield found

    def _lines(self, path: str, number: int, block: bytes) -> list[Event]:
        found: list[Event] = []
        for line in block.split(b"\n"):
            number += 1
            if not line:
                continue
            try:
                event = decode(line, where=f"{path}:{number}")
            except ConfigError:
                raise
            except ValueError as error:
                self.damaged.append(f"{PurePath(path).name}:{number}: {error}")
                continue
            if event is not None:
                found.append(event)
        return found
