"""Step records: what each rank's training loop really got, one JSON line a batch, for ``cacheloader audit``.

A folder holds one append-only file for each attempt and rank, and the manifest once, so that the order of samples can
be computed again. After a kill nothing that the training loop had in hand is missing, see ``lines``.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheloader.errors import ConfigError
from cacheloader.lines import LineFile, heading, json_line, num_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from cacheloader.manifest.record import Manifest

FORMAT_VERSION = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """One rank began to iterate.

    Attributes:
        attempt: Name of the launch, the same on all its ranks.
        rank: In ``[0, world_size)``.
        world_size: Ranks of the attempt.
        seq: Number of the record among those of its attempt and rank.
        wall_ns: When, in nanoseconds since 1970.
        epoch: The position that was loaded, or where the iteration goes on.
        row: Likewise.
        global_batch: Samples of one step over all ranks.
        num_workers: Worker processes of the loader.
        manifest: Digest of the manifest.
        order: The order's fields, as a position holds them.
    """

    attempt: str
    rank: int
    world_size: int
    seq: int
    wall_ns: int
    epoch: int
    row: int
    global_batch: int
    num_workers: int
    manifest: str
    order: Mapping[str, int | float | str | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rank's training loop got its part of one step.

    Attributes:
        attempt: Name of the launch, the same on all its ranks.
        rank: In ``[0, world_size)``.
        world_size: Ranks of the attempt.
        seq: Number of the record among those of its attempt and rank.
        epoch: Epoch, from 0.
        row: First row of the step.
        rows: Rows of the step.
        global_batch: Samples of the step over all ranks.
        num_samples: Samples that this rank's batch holds.
        num_skipped: Samples that the transform left out on purpose.
        num_bad: Samples that were left out since the transform failed on them.
        keys: Number in the data set of each sample read, in place order, left-out ones included; ``None`` if not
            recorded.
    """

    attempt: str
    rank: int
    world_size: int
    seq: int
    epoch: int
    row: int
    rows: int
    global_batch: int
    num_samples: int
    num_skipped: int
    num_bad: int
    keys: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All records of a folder.

    Attributes:
        records: Of one attempt and rank after another, each in order of ``seq``.
        damaged: Lines inside a file that cannot be read, as ``file:line: why``.
    """

    records: list[Begin | Step] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class StepLog:
    """Writes the records of one rank in one attempt. A full disk costs records, never the job.

    Args:
        folder: Where the files lie; made if need be. Give each loader one of its own.
        attempt: Name of the launch, the same on all ranks.
        rank: This process.
        world_size: Ranks of the attempt.

    Raises:
        ConfigError: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, attempt: str, rank: int, world_size: int) -> None:
        self._path = folder / f"steps-{attempt}-r{rank:05d}.jsonl"
        self._rank = rank
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(self._path)
            self._seq = num_lines(self._path)
        except OSError as error:
            raise ConfigError(
                f"record_to={str(folder)!r} cannot be written: {error.strerror}; pass a folder that every rank can "
                "write, or leave record_to out"
            ) from error
        self._has_failed = False
        self._heading = heading(
            version=FORMAT_VERSION, run=folder.resolve().name, attempt=attempt, rank=rank, world_size=world_size
        )

    def begin(
        self,
        *,
        epoch: int,
        row: int,
        global_batch: int,
        num_workers: int,
        manifest: Manifest,
        order: Mapping[str, int | float | str | bool],
    ) -> None:
        """Record that an iteration starts at (``epoch``, ``row``); rank 0 stores the manifest beside it."""
        if self._rank == 0:
            _store_manifest(self._path.parent, manifest)
        self._write(
            "begin",
            f',"epoch":{epoch},"row":{row},"global_batch":{global_batch},"workers":{num_workers},'
            f'"manifest":"{manifest.digest}","order":{json.dumps(dict(order))}',
        )

    def step(
        self,
        *,
        epoch: int,
        row: int,
        rows: int,
        global_batch: int,
        num_samples: int,
        num_skipped: int,
        num_bad: int,
        fetch_s: float,
        keys: Sequence[int] | None = None,
    ) -> None:
        """Record one batch at the moment the training loop gets it."""
        named = "" if keys is None else f',"keys":{json.dumps(list(keys), separators=(",", ":"))}'
        self._write(
            "step",
            f',"epoch":{epoch},"row":{row},"rows":{rows},"global_batch":{global_batch},"samples":{num_samples},'
            f'"skipped":{num_skipped},"bad":{num_bad},"fetch_s":{fetch_s:.6f}{named}',
        )

    def _write(self, event: str, fields: str) -> None:
        seq, self._seq = self._seq, self._seq + 1
        try:
            self._file.append(json_line(event, seq, self._heading, fields))
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("step records in %s have a hole from here on: %s", self._path, error)


def read_folder(folder: Path) -> Recorded:
    """Every record below ``folder``; a torn last line counts as not written, a line written twice counts once.

    Raises:
        ConfigError: The folder holds no records, or such of a newer cacheloader.
    """
    paths = sorted(folder.glob("steps-*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder} holds no step records; pass the folder that the loader had as record_to")
    damaged: list[str] = []
    streams: dict[tuple[str, int], dict[int, Begin | Step]] = {}
    for path in paths:
        for number, line in _whole_lines(path):
            try:
                record = _parsed(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                damaged.append(f"{path.name}:{number}: {type(error).__name__}: {error}")
                continue
            if isinstance(record, int):
                raise ConfigError(
                    f"{path}:{number} has format version {record} and this cacheloader reads version {FORMAT_VERSION}; "
                    "audit it with the release that wrote it"
                )
            if record is not None:
                streams.setdefault((record.attempt, record.rank), {}).setdefault(record.seq, record)
    records = [stream[seq] for _, stream in sorted(streams.items()) for seq in sorted(stream)]
    return Recorded(records=records, damaged=damaged)


def manifest_path(folder: Path, digest: str) -> Path:
    """Where ``folder`` keeps the manifest of this digest."""
    return folder / f"manifest-{digest}.bin"


def _store_manifest(folder: Path, manifest: Manifest) -> None:
    path = manifest_path(folder, manifest.digest)
    if path.exists():
        return
    half = path.with_suffix(f".{os.getpid()}.half")
    try:
        half.write_bytes(manifest.to_bytes())
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        _log.warning("the manifest of these step records could not be stored as %s: %s", path, error)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line != b"\n":
                yield number, line


def _parsed(line: Any) -> Begin | Step | int | None:
    """A record; a number if it is of that unknown version, ``None`` if it is of no concern here."""
    if line["v"] != FORMAT_VERSION:
        return int(line["v"])
    if line["ev"] not in ("begin", "step") or "row" not in line:
        return None
    common: dict[str, Any] = {
        "attempt": str(line["att"]),
        **{name: int(line[name]) for name in ("rank", "seq", "epoch", "row", "global_batch")},
        "world_size": int(line["world"]),
    }
    if line["ev"] == "begin":
        return Begin(
            **common,
            wall_ns=int(line["wall_ns"]),
            num_workers=int(line["workers"]),
            manifest=str(line["manifest"]),
            order=dict(line["order"]),
        )
    keys = line.get("keys")
    return Step(
        **common,
        rows=int(line["rows"]),
        num_samples=int(line["samples"]),
        num_skipped=int(line["skipped"]),
        num_bad=int(line["bad"]),
        keys=None if keys is None else tuple(map(int, keys)),
    )
