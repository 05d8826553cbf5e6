"""A batch on its way from a worker: a small description for torch's pipe, and all that is large in a shared block.

Bytes, numpy arrays and CPU tensors inside plain containers go into the block. Everything else stays in the description
and travels as torch sends it. The training process gets objects of the same types and values: bytes are copied out of
the block, large arrays and tensors lie in it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from cacheloader.blocks import Held
from cacheloader.heap import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.blocks import Block, Blocks

_ALIGNMENT_BYTES = 64
_LEAST_BYTES = 512
"""Byte strings that are shorter together, or alone, are not worth a place of their own."""

_COPIED_BYTES = 16 << 10
"""Arrays up to this size are copied out, so that a label does not keep a block of images."""

_ATOMS = frozenset((int, float, complex, bool, str, type(None)))


@dataclass(slots=True)
class _Text:
    """Byte strings, one behind the other."""

    start: int
    sizes: list[int]
    is_list: bool
    kind: type


@dataclass(slots=True)
class _Array:
    """A numpy array."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]


@dataclass(slots=True)
class _Tensor:
    """A tensor, its dimensions in the order of their strides."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pile:
    """Tensors that are to be stacked, and will be in the block itself; a worker has nothing else to do with the stack.

    Attributes:
        tensors: Of one shape and type, all their numbers in C order.
    """

    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Self | None:
        """``tensors``; ``None`` where torch's own stacking would do more than copy them one behind the other."""
        first = tensors[0]
        shape, dtype = first.shape, first.dtype
        for tensor in tensors:
            if (
                type(tensor) is not torch.Tensor
                or tensor.dtype != dtype
                or tensor.shape != shape
                or not _is_plain(tensor)
                or not tensor.is_contiguous()
            ):
                return None
        return cls(tensors=tensors)


class Parcel:
    """A batch.

    Args:
        content: The batch, with descriptions in place of what lies in the block.
        block: The block.
    """

    def __init__(self, content: Any, block: Block) -> None:
        self._content = content
        self._identity = block.blocks.identity
        self._number = block.number
        self._size_bytes = block.size_bytes
        self._held: Held | None = None

    @classmethod
    def packed(cls, data: Any, blocks: Blocks, *, worker: int) -> Any:
        """``data`` in a parcel; ``data`` itself where nothing in it is large, or no block is free.

        Args:
            data: What the collate function returned; it may have piles in place of tensors.
            blocks: The loader's.
            worker: Number of this worker.
        """
        packing = _Packing()
        content = packing.described(data)
        if not packing.puts:
            return data
        block = blocks.take(worker)
        if block is None:
            return data
        memory = block.reserve(packing.size_bytes)
        if memory is None:
            block.give_back()
            return data
        for put in packing.puts:
            put(memory)
        return cls(content, block)

    def unpacked(self) -> Any:
        """The batch. Works once."""
        held, self._held = self._held, None
        if held is None:
            raise RuntimeError("the blocks of this batch's loader are gone; it was kept, unread, beyond its iteration")
        return _Unpacking(held.array()).restored(self._content)

    def pin_memory(self, device: str | None = None) -> Any:
        """The batch with its tensors in pinned memory; torch calls this."""
        return pin_memory(self.unpacked(), device)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> tuple[Any, ...]:
        return self._content, self._identity, self._number, self._size_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._content, self._identity, self._number, self._size_bytes = state
        # From now on the block is this process's, and free when this parcel is dropped, read or unread.
        self._held = Held.of(self._identity, self._number, self._size_bytes)


class _Packing:
    """What goes into the block, and the batch without it."""

    def __init__(self) -> None:
        self.puts: list[Callable[[np.ndarray[Any, np.dtype[np.uint8]]], None]] = []
        self.size_bytes = 0
        self._seen: dict[int, Any] = {}  # an object that appears twice in a batch is one object on the other side, too

    def described(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        known = self._seen.get(id(value))
        if known is not None:
            return known
        if kind is dict or kind is OrderedDict:
            made: Any = kind()
            self._seen[id(value)] = made
            for name, part in value.items():
                made[name] = self.described(part)
            return made
        if kind is list:
            return self._list(value)
        if kind is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            parts = [self.described(part) for part in value]
            if all(part is former for part, former in zip(parts, value, strict=True)):
                return value
            return tuple(parts) if kind is tuple else kind._make(parts)
        return self._leaf(value, kind)

    def _list(self, value: list[Any]) -> Any:
        kinds = set(map(type, value))
        if kinds <= _ATOMS:
            return value
        if kinds == {bytes}:
            sizes = list(map(len, value))
            if sum(sizes) < _LEAST_BYTES:
                return value
            return self._keep(value, self._text(value, sizes, is_list=True, kind=bytes))
        made: list[Any] = []
        self._seen[id(value)] = made
        made.extend(map(self.described, value))
        return made

    def _leaf(self, value: Any, kind: type) -> Any:
        if (kind is bytes or kind is bytearray) and len(value) >= _LEAST_BYTES:
            return self._keep(value, self._text([value], [len(value)], is_list=False, kind=kind))
        if kind is np.ndarray and not value.dtype.hasobject and value.size:
            if value.flags.c_contiguous:
                return self._keep(value, self._array(value, "C"))
            if value.flags.f_contiguous:
                return self._keep(value, self._array(value, "F"))
        if kind is Pile:
            return self._keep(value, self._pile(value.tensors))
        if kind is torch.Tensor and _is_plain(value):
            by_stride = sorted(range(value.dim()), key=lambda at: -value.stride(at))
            dense = value.permute(by_stride)
            if dense.is_contiguous():
                return self._keep(value, self._tensor(dense, tuple(by_stride)))
        return value

    def _keep(self, value: Any, description: Any) -> Any:
        self._seen[id(value)] = description
        return description

    def _place(self, size_bytes: int) -> int:
        start = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.size_bytes = start + size_bytes
        return start

    def _text(self, values: list[Any], sizes: list[int], *, is_list: bool, kind: type) -> _Text:
        start = self._place(sum(sizes))

        def put(memory: Any) -> None:
            target, at = memory.data, start
            for value, size in zip(values, sizes, strict=True):
                target[at : at + size] = value
                at += size

        self.puts.append(put)
        return _Text(start, sizes, is_list, kind)

    def _array(self, value: Any, order: Literal["C", "F"]) -> _Array:
        start = self._place(value.nbytes)

        def put(memory: Any) -> None:
            np.ndarray(value.shape, value.dtype, memory, start, order=order)[...] = value

        self.puts.append(put)
        return _Array(start, value.shape, value.dtype, order)

    def _tensor(self, dense: torch.Tensor, order: tuple[int, ...]) -> _Tensor:
        size_bytes = dense.numel() * dense.element_size()
        start = self._place(size_bytes)

        def put(memory: Any) -> None:
            _as_tensor(memory[start : start + size_bytes], dense.dtype, tuple(dense.shape)).copy_(dense)

        self.puts.append(put)
        return _Tensor(start, tuple(dense.shape), dense.dtype, order)

    def _pile(self, tensors: list[torch.Tensor]) -> _Tensor:
        first, shape = tensors[0], (len(tensors), *tensors[0].shape)
        size_bytes = len(tensors) * first.numel() * first.element_size()
        start = self._place(size_bytes)

        def put(memory: Any) -> None:
            torch.stack(tensors, 0, out=_as_tensor(memory[start : start + size_bytes], first.dtype, shape))

        self.puts.append(put)
        return _Tensor(start, shape, first.dtype, tuple(range(len(shape))))


class _Unpacking:
    """The batch as it was."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._bytes = memory.data
        self._seen: dict[int, Any] = {}

    def restored(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        known = self._seen.get(id(value))
        if known is not None:
            return known
        if kind is _Text:
            made = self._text(value)
        elif kind is _Array:
            made = self._array(value)
        elif kind is _Tensor:
            made = self._tensor(value)
        elif kind is dict or kind is OrderedDict:
            self._seen[id(value)] = value
            for name, part in value.items():
                value[name] = self.restored(part)
            return value
        elif kind is list:
            self._seen[id(value)] = value
            if not set(map(type, value)) <= _ATOMS:
                value[:] = map(self.restored, value)
            return value
        elif kind is tuple or (isinstance(value, tuple) and hasattr(value, "_make")):
            parts = [self.restored(part) for part in value]
            made = tuple(parts) if kind is tuple else kind._make(parts)
        else:
            return value
        self._seen[id(value)] = made
        return made

    def _text(self, text: _Text) -> Any:
        content, kind, at = self._bytes, text.kind, text.start
        if sum(text.sizes) > _COPIED_BYTES:
            keep_freed_memory()
        made = []
        for size in text.sizes:
            made.append(kind(content[at : at + size]))
            at += size
        return made if text.is_list else made[0]

    def _array(self, array: _Array) -> Any:
        made: Any = np.ndarray(array.shape, array.dtype, self._memory, array.start, order=array.order)
        return made.copy(order=array.order) if made.nbytes <= _COPIED_BYTES else made

    def _tensor(self, tensor: _Tensor) -> torch.Tensor:
        size_bytes = tensor.dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        memory = self._memory[tensor.start : tensor.start + size_bytes]
        if size_bytes <= _COPIED_BYTES:
            memory = memory.copy()
        dense = _as_tensor(memory, tensor.dtype, tensor.shape)
        back = sorted(range(len(tensor.order)), key=tensor.order.__getitem__)
        return dense.permute(back)


def _as_tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its numbers."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )
