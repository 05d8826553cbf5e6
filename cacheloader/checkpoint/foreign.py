"""Checkpoints that other tools wrote: torch DCP, torchtitan, Hugging Face, Lightning; looked at, never loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby
from typing import IO, TYPE_CHECKING, cast

from cacheloader.checkpoint.archives import Slice, wrong_archive, wrong_safetensors
from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheloader.checkpoint.store import File, Store

_METADATA = ".metadata"
_ARCHIVES = (".ckpt", ".pt", ".pth", ".bin")
_STEP = re.compile(r"(?:^|[^a-z])(?:step|checkpoint)[-_=]?(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint of another tool.

    Attributes:
        name: Its folder or file.
        kind: Who writes such.
        step: From its name; -1 where that does not tell.
        size_bytes: Of all its files.
        reason: Why it cannot be whole; empty if nothing speaks against it.
        proof: What was looked at: ``"checksums"``, or ``"sizes"`` where there are none or none were asked for.
    """

    name: str
    kind: str
    step: int
    size_bytes: int
    reason: str
    proof: str


def examine(store: Store, name: str, *, read_bytes: bool) -> Foreign | None:
    """What a folder or file is, and whether it can be whole.

    Args:
        store: Where it lies.
        name: A name right below the store's root.
        read_bytes: Read everything and compare checksums, where the format has some.

    Returns:
        ``None`` if it is no checkpoint that is known here.
    """
    files = store.files(name)
    kind = _kind(name, files)
    if not kind:
        return None
    check = _dcp if kind in ("dcp", "torchtitan") else _files
    reason, has_checksums = check(store, name, files, read_bytes=read_bytes)
    return Foreign(
        name=name,
        kind=kind,
        step=_step(name),
        size_bytes=sum(file.size_bytes for file in files.values()),
        reason=reason,
        proof="checksums" if read_bytes and has_checksums else "sizes",
    )


def newest_first(store: Store) -> list[tuple[str, str]]:
    """Name and kind of each checkpoint of another tool right below the root, latest step first; none is opened."""
    found = [(name, kind) for name in store.top() if (kind := _kind(name, store.files(name)))]
    return sorted(found, key=lambda one: (-_step(one[0]), one[0]))


def _step(name: str) -> int:
    match = _STEP.search(name.lower())
    return int(match[1]) if match else -1


def _kind(name: str, files: Mapping[str, File]) -> str:
    if "" in files:
        if name.endswith(".ckpt"):
            return "lightning"
        return "torch" if name.endswith((".pt", ".pth")) else "safetensors" if name.endswith(".safetensors") else ""
    direct = [file for file in files if "/" not in file]
    if _METADATA in files or any(file.endswith(".distcp") for file in direct):
        return "torchtitan" if re.fullmatch(r"step-\d+", name) else "dcp"
    if "trainer_state.json" in files or re.fullmatch(r"checkpoint-\d+", name):
        return "hf trainer"
    return "hf" if any(file.endswith(".safetensors") for file in direct) else ""


def _dcp(store: Store, name: str, files: Mapping[str, File], *, read_bytes: bool) -> tuple[str, bool]:
    if _METADATA not in files:
        return f"no {_METADATA}: the save was interrupted, or is still under way", False
    from cacheloader.checkpoint.torch_metadata import entries, parse_metadata

    with store.reading(f"{name}/{_METADATA}") as stream:
        try:
            record = parse_metadata(stream.read())
            parts = entries(record)
        except CheckpointError as error:
            return error.message, False
    ends: dict[str, int] = {}
    for part in parts:
        ends[part.file] = max(ends.get(part.file, 0), part.offset + part.length)
    for file, end in sorted(ends.items()):
        if file not in files:
            return f"{file} is missing", False
        if files[file].size_bytes != end:
            return f"{file} has {files[file].size_bytes:,} bytes, and {_METADATA} describes {end:,}", False
    written = files[_METADATA].modified_s
    for file in sorted(ends):
        modified = files[file].modified_s
        if written is not None and modified is not None and modified > written:
            return (
                f"{file} is {modified - written:.1f} s newer than {_METADATA}: a later save into the same folder did "
                "not end, or it was copied without its times"
            ), False
    for file, held in groupby(parts, key=lambda part: part.file) if read_bytes else ():
        with store.reading(f"{name}/{file}") as stream:
            for part in held:
                section = cast("IO[bytes]", Slice(stream, offset=part.offset, length=part.length))
                reason = wrong_archive(section, read_bytes=True) if part.is_plain else ""
                if reason:
                    return f"{part.key} in {file} {reason}", True
    return "", all(part.is_plain for part in parts)


def _files(store: Store, name: str, files: Mapping[str, File], *, read_bytes: bool) -> tuple[str, bool]:
    """One by one, as all but DCP write them: archives, safetensors, and JSON that names others."""
    has_checksums = True
    for file in sorted(files):
        path = f"{name}/{file}" if file else name
        with store.reading(path) as stream:
            reason = ""
            if path.endswith(_ARCHIVES) and file != "training_args.bin":
                reason = wrong_archive(stream, read_bytes=read_bytes)
            elif path.endswith(".safetensors"):
                reason, has_checksums = wrong_safetensors(stream, size_bytes=files[file].size_bytes), False
            elif path.endswith(".index.json") or file == "trainer_state.json":
                reason = _wrong_json(stream.read(), name=name, file=file, files=files)
        if reason:
            return f"{file or name} {reason}", has_checksums
    if re.fullmatch(r"checkpoint-\d+", name):
        if "trainer_state.json" not in files:
            return "trainer_state.json, which is written last, is missing", has_checksums
        if "scheduler.pt" in files and not any(file.startswith("optimizer") for file in files):
            return "the optimizer is missing, and its scheduler is there", has_checksums
    return "", has_checksums


def _wrong_json(data: bytes, *, name: str, file: str, files: Mapping[str, File]) -> str:
    try:
        record = json.loads(data)
        if file == "trainer_state.json":
            step = int(record["global_step"])
            return f"is of step {step}" if name.startswith("checkpoint-") and name != f"checkpoint-{step}" else ""
        missing = sorted(set(record["weight_map"].values()) - set(files))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return f"names {missing[0]}, which is missing" if missing else ""
