"""The copy that a save in the background works from."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Staging:
    """CPU memory for one state, kept from save to save: fresh memory would have to be paged in each time.

    Saves do not overlap, so one copy is enough.

    Args:
        shared: Whether another process is to read it.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._pinned = torch.cuda.is_available() and not shared
        self._signature: Any = None
        self._memory: dict[str, Any] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of all tensors; the structure is new, the memory that of the last copy if it fits."""
        state = dict(state)
        signature = _signature(state)
        if signature != self._signature:
            self._memory = {}  # first, so that old and new never exist together
            self._memory = _create_cpu_state_dict(state, pin_memory=self._pinned, share_memory=self._shared)
            self._signature = signature
        return _copy_state_dict(state, self._memory, type_check=False)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        placements = getattr(value, "placements", None)
        local = value.to_local() if placements is not None else value  # type: ignore[attr-defined]
        return (tuple(value.shape), tuple(local.shape), value.dtype, placements)
    if isinstance(value, dict):
        return tuple((key, _signature(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(_signature(part) for part in value)
    return type(value)


def plain_copy(value: Any, *, name: str) -> Any:
    """A deep copy, made by saving and loading as a checkpoint does, so that what could not be loaded is found now.

    Args:
        value: Tensors, numbers, text, None, and dicts, lists and tuples of them.
        name: Whose state it is, for the error.

    Raises:
        ConfigError: It holds something else.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True, map_location="cpu")
    except Exception as error:  # torch reports each kind of foreign object in its own way
        raise ConfigError(
            f"the state of {name} could not be loaded again without running code that lies in the checkpoint "
            f"({str(error).splitlines()[0]}); let its state_dict() return tensors, numbers, text, lists and dicts"
        ) from error
