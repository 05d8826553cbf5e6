"""The commit record: what a complete checkpoint consists of, file by file. Written last, and checks itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import google_crc32c

from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMIT_FILE = "commit.json"
FORMAT_VERSION = 1

_NAME = re.compile(r"(?P<serial>\d{6,})-step-(?P<step>\d+)-(?P<attempt>[0-9a-f]{8})")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Name:
    """The folder of one save; no two saves share one.

    Attributes:
        serial: Counts saves of a job over all its attempts, so it orders them without any clock; from 1.
        step: Training step that was complete.
        attempt: Eight hexadecimal digits, new in each attempt: one that was believed dead cannot write into ours.
    """

    serial: int
    step: int
    attempt: str

    def __str__(self) -> str:
        return f"{self.serial:06d}-step-{self.step}-{self.attempt}"


def parse_name(text: str) -> Name | None:
    """The name that a folder has, ``None`` if it is none of ours."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    return Name(serial=int(match["serial"]), step=int(match["step"]), attempt=match["attempt"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a checkpoint.

    Attributes:
        size_bytes: Its length.
        crc32c: Checksum of the bytes that were handed to the store, from 0 to 2³²-1.
    """

    size_bytes: int
    crc32c: int

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or not 0 <= self.crc32c < 2**32:
            raise ValueError(f"a file of {self.size_bytes} bytes with checksum {self.crc32c}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A complete checkpoint.

    Attributes:
        serial: As in its ``Name``.
        step: Training step that was complete.
        attempt: As in its ``Name``.
        world_size: Ranks that wrote it.
        saved_at: UTC time of rank 0 at which the state was taken, ISO 8601; for people, never compared.
        versions: Of torch and cacheloader.
        files: Every file by its name in the folder, this record itself aside.
    """

    serial: int
    step: int
    attempt: str
    world_size: int
    saved_at: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Part]

    @property
    def name(self) -> Name:
        """The folder's name."""
        return Name(serial=self.serial, step=self.step, attempt=self.attempt)

    @property
    def size_bytes(self) -> int:
        """Sum over all files."""
        return sum(part.size_bytes for part in self.files.values())

    @property
    def digest(self) -> str:
        """Names this checkpoint by what it holds: two with the same digest are the same to the last byte."""
        return hashlib.blake2b(encode(self), digest_size=8).hexdigest()


def encode(commit: Commit) -> bytes:
    """JSON with a checksum of itself, so that half a record, or one that was edited, is none."""
    record = {"cacheloader_checkpoint": FORMAT_VERSION, **asdict(commit)}
    record["files"] = {name: [part.size_bytes, f"{part.crc32c:08x}"] for name, part in sorted(commit.files.items())}
    record["crc32c"] = f"{_checksum(record):08x}"
    return json.dumps(record, indent=1).encode() + b"\n"


def decode(data: bytes) -> Commit:
    """The record in ``data``.

    Raises:
        CheckpointError: It is incomplete, altered, or of a newer format.
    """
    try:
        record: dict[str, Any] = json.loads(data)
        version = record.pop("cacheloader_checkpoint")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"its {COMMIT_FILE} is incomplete or not one ({len(data)} bytes)") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"its {COMMIT_FILE} has format version {version!r} and this cacheloader reads {FORMAT_VERSION}; use the "
            "release that wrote it"
        )
    stated = record.pop("crc32c", None)
    actual = f"{_checksum({'cacheloader_checkpoint': version, **record}):08x}"
    if stated != actual:
        raise CheckpointError(f"its {COMMIT_FILE} was altered: checksum {actual}, and it says {stated}")
    try:
        files = {name: Part(size_bytes=size, crc32c=int(crc, 16)) for name, (size, crc) in record.pop("files").items()}
        return Commit(**record, files=files)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"its {COMMIT_FILE} has other fields than a record of version {version}") from error


def _checksum(record: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(record, sort_keys=True).encode()))
