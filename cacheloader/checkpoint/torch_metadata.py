"""torch's ``.metadata`` without trust: its opcodes are followed here, and build only the few types it consists of.

torch itself loads the file with ``pickle``, so that whoever can write to a checkpoint folder can run code in each job
that resumes from it. An opcode, a name or a call that is not in the lists below is an error.
"""

from __future__ import annotations

import pathlib
import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[tuple[str, str], type] = {
    (_METADATA, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo}


def _path(*parts: str) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*parts)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise CheckpointError(f"its .metadata names the layout {name!r}, which no saved tensor has")
    return torch.strided


def _member(kind: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """What python 3.11.0 to 3.11.3 write for a member of an enum: ``getattr``, of which no more than this is done."""
    if kind is not metadata._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise CheckpointError(f"its .metadata asks for {name!r} of {kind!r}, which no record of torch does")
    return metadata._MEM_FORMAT_ENCODING[name]


_CALLABLES: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (_METADATA, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
}
_MARK = object()


def parse_metadata(data: bytes) -> metadata.Metadata:
    """The record in a ``.metadata`` file.

    Raises:
        CheckpointError: It is incomplete, or holds anything that such a record does not consist of.
    """
    try:
        found = _Machine().run(data)
    except CheckpointError:
        raise
    except Exception as error:  # a torn file can break off anywhere, and each place fails in its own way
        raise CheckpointError(
            f"its .metadata is torn or none of torch's ({type(error).__name__}: {error}; {len(data)} bytes)"
        ) from error
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError(f"its .metadata holds a {type(found).__name__} and no record of a checkpoint")
    return found


class _Machine:
    """The part of pickle's virtual machine that the record needs."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                self._stack.append(argument)
            elif name in _IGNORED:
                continue
            else:
                step = getattr(self, f"_{name.lower()}", None)
                if step is None:
                    raise CheckpointError(f"its .metadata uses the opcode {name}, which no record of torch needs")
                step(argument)
        raise CheckpointError("its .metadata breaks off")

    def _until_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
        values = self._stack[place + 1 :]
        del self._stack[place:]
        return values

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._until_mark()))

    def _last(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(values)

    def _tuple1(self, _: Any) -> None:
        self._last(1)

    def _tuple2(self, _: Any) -> None:
        self._last(2)

    def _tuple3(self, _: Any) -> None:
        self._last(3)

    def _append(self, _: Any) -> None:
        value = self._stack.pop()
        self._stack[-1].append(value)

    def _appends(self, _: Any) -> None:
        values = self._until_mark()
        self._stack[-1].extend(values)

    def _setitem(self, _: Any) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._stack[-1][key] = value

    def _setitems(self, _: Any) -> None:
        values = self._until_mark()
        self._stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binput(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    _long_binput = _binput

    def _binget(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _long_binget = _binget

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(_named(module, name))

    def _stack_global(self, _: Any) -> None:
        name = self._stack.pop()
        module = self._stack.pop()
        self._stack.append(_named(module, name))

    def _newobj(self, _: Any) -> None:
        arguments = self._stack.pop()
        kind = self._stack.pop()
        if kind not in _CLASSES.values() or arguments != ():
            raise CheckpointError(f"its .metadata makes a {kind!r}, of which no record of torch consists")
        self._stack.append(kind.__new__(kind))

    def _reduce(self, _: Any) -> None:
        arguments = self._stack.pop()
        function = self._stack.pop()
        if function not in _CALLABLES.values():
            raise CheckpointError(f"its .metadata calls {function!r}, which no record of torch does")
        self._stack.append(function(*arguments))

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) not in _CLASSES.values():
            raise CheckpointError(f"its .metadata fills a {type(target).__name__}, of which no record consists")
        if isinstance(target, metadata.TensorProperties):
            target.__setstate__(state)  # type: ignore[no-untyped-call]
            return
        for name, value in state.items():
            object.__setattr__(target, name, value)  # MetadataIndex is frozen


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_IGNORED = {"PROTO", "FRAME"}


def _named(module: str, name: str) -> Any:
    if (module, name) in _CLASSES:
        return _CLASSES[module, name]
    if (module, name) in _CALLABLES:
        return _CALLABLES[module, name]
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    raise CheckpointError(f"its .metadata names {module}.{name}, of which no record of torch consists")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one value, or one piece of a tensor, lies.

    Attributes:
        key: Its name in the state.
        file: The file.
        offset: Where in the file it begins, in bytes.
        length: How long it is, in bytes.
        is_plain: Whether it is an archive as ``torch.save`` writes it, neither transformed nor of another format.
    """

    key: str
    file: str
    offset: int
    length: int
    is_plain: bool


def entries(record: metadata.Metadata) -> list[Entry]:
    """Every value of a checkpoint, in the order of files and offsets.

    Raises:
        CheckpointError: A value is announced, and no file is said to hold it.
    """
    found = []
    places = record.storage_data or {}
    for key, kind in record.state_dict_metadata.items():
        if isinstance(kind, metadata.TensorStorageMetadata):
            wanted = [metadata.MetadataIndex(key, chunk.offsets) for chunk in kind.chunks]
        else:
            wanted = [metadata.MetadataIndex(key)]
        for index in wanted:
            place = places.get(index)
            if place is None:
                raise CheckpointError(
                    f"its .metadata announces {key} and no file holds it: a thread of the writer failed unheard"
                )
            found.append(
                Entry(
                    key=key,
                    file=place.relative_path,
                    offset=place.offset,
                    length=place.length,
                    is_plain=place.relative_path.endswith(".distcp")
                    and not getattr(place, "transform_descriptors", None),
                )
            )
    return sorted(found, key=lambda entry: (entry.file, entry.offset))
