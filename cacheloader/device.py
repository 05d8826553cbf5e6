"""Moving batches to an accelerator while the step before them still computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches with every tensor on ``device``, one copied ahead on a stream of its own.

    Args:
        batches: Tensors, or dicts, lists and tuples of them; pinned tensors are copied without waiting.
        device: Where to; a CPU is a plain pass.
    """
    if device.type != "cuda":
        for batch in batches:
            yield _moved(batch, device)
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: Any = None
    has_ahead = False
    for batch in batches:
        with torch.cuda.stream(side):
            moved = _moved(batch, device)
        if has_ahead:
            yield _handed_over(ahead, side, device)
        ahead, has_ahead = moved, True
    if has_ahead:
        yield _handed_over(ahead, side, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    return _mapped(batch, lambda tensor: _moved(tensor, device))


def _handed_over(batch: Any, side: torch.cuda.Stream, device: torch.device) -> Any:
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    _record(batch, current)
    return batch


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    # The allocator must not reuse the memory for the side stream while the current one still reads it.
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    else:
        _mapped(batch, lambda part: _record(part, stream))


def _mapped(batch: Any, change: Any) -> Any:
    if isinstance(batch, dict):
        return {name: change(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(part) for part in batch)
    return batch
