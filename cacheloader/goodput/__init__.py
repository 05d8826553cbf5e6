"""Goodput: what became of the device-seconds that a run was paid for.

Every rank writes events (``Run``), a pure fold makes an exact account of them (``ledger``), ``cacheloader goodput``
shows it. Nothing here imports torch but ``measuring``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheloader.goodput import export as export
    from cacheloader.goodput import recorder as recorder
    from cacheloader.goodput.recorder import active as active
    from cacheloader.goodput.run import Run as Run

_ROOMS = {"Run": "cacheloader.goodput.run", "active": "cacheloader.goodput.recorder"}

__all__ = ["Run", "active", "export", "recorder"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(_ROOMS[name]), name)
    if name in ("export", "recorder"):
        return import_module(f"cacheloader.goodput.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
