"""Sizes and durations: the only place where text such as ``"64MiB"`` or ``"250ms"`` is parsed."""

from __future__ import annotations

import re

from cacheloader.errors import ConfigError

_SIZE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_DURATION_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, *, name: str = "size") -> int:
    """Bytes from an integer or text.

    Args:
        value: ``1048576``, ``"1MiB"`` or ``"1.5 GB"``; decimal units are powers of 1,000.
        name: The option's name, for the error.

    Returns:
        A number of bytes, 0 or more.

    Raises:
        ConfigError: The text is no size, or the number is negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f'{name}={value!r} is no size; pass bytes as an integer, or text such as "64MiB"')
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_duration(value: float | str, *, name: str = "duration") -> float:
    """Seconds from a number or text such as ``"250ms"``, ``"30s"`` or ``"2h"``.

    Args:
        value: Seconds as a number, or text with a unit.
        name: The option's name, for the error.

    Returns:
        Seconds, 0 or more.

    Raises:
        ConfigError: The text is no duration, or the number is negative or not finite.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    unit = _DURATION_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(f'{name}={value!r} is no duration; pass seconds as a number, or text such as "250ms"')
    return float(match[1]) * unit


def format_size(size_bytes: float) -> str:
    """``size_bytes`` for a person: ``"512 B"``, ``"64.0 MiB"``."""
    if size_bytes < 2**10:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size_bytes /= 2**10
        if size_bytes < 2**10:
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 2**10:.1f} PiB"
