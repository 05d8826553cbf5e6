"""CRC32C of a shard whose ranges arrive in any order: each is summed while it is in the processor's cache, then joined.

Joining follows from the arithmetic: behind a first part, ``n`` more bytes multiply its remainder by x^8n modulo the
polynomial. All numbers are bit-reversed, as CRC32C is: the highest bit is x^0.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

POLYNOMIAL = 0x82F63B78
"""CRC32C (Castagnoli), bit-reversed and without its highest term. Source: RFC 3720, appendix B.4."""

BLOCK_BYTES = 2**18
"""Written and summed at a time: small enough to stay in a core's second-level cache in between."""

_ONE = 1 << 31
_BYTE = _ONE >> 8


class ShardChecksum:
    """Collects the sums of a shard's ranges. Safe to call from many threads: each range is added once."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}

    def write(self, write_at: Callable[[int, Buffer], object], offset: int, body: Buffer) -> None:
        """Hand a range on, block by block, and add its sum.

        Args:
            write_at: Takes an offset and bytes.
            offset: Where the range begins in the shard.
            body: Its bytes.
        """
        crc32c = 0
        with memoryview(body).cast("B") as view:
            for start in range(0, len(view), BLOCK_BYTES):
                with view[start : start + BLOCK_BYTES] as block:
                    write_at(offset + start, block)
                    # The library takes bytes only; a copy inside the cache costs a tenth of a second pass over memory.
                    crc32c = google_crc32c.extend(crc32c, block.tobytes())
            self._parts[offset] = len(view), crc32c

    def value(self, size_bytes: int) -> int:
        """The sum of the first ``size_bytes`` bytes.

        Raises:
            ValueError: The ranges do not cover exactly these bytes.
        """
        position = crc32c = 0
        for offset, (part_bytes, part_crc32c) in sorted(self._parts.items()):
            if offset != position:
                break
            crc32c = joined(crc32c, part_crc32c, part_bytes)
            position += part_bytes
        if position != size_bytes or sum(part_bytes for part_bytes, _ in self._parts.values()) != size_bytes:
            raise ValueError(f"the sums of {len(self._parts)} ranges do not cover a shard of {size_bytes} bytes")
        return crc32c


def joined(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two strings of bytes behind each other.

    Args:
        first: Sum of the first one.
        second: Sum of the second one.
        second_bytes: Length of the second one.
    """
    return _product(_shift(second_bytes), first) ^ second


@functools.lru_cache(maxsize=64)  # most ranges have one length
def _shift(num_bytes: int) -> int:
    """x^8n modulo the polynomial, by repeated squaring."""
    power, square = _ONE, _BYTE
    while num_bytes:
        if num_bytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        num_bytes >>= 1
    return power


def _product(left: int, right: int) -> int:
    """``left`` times ``right`` modulo the polynomial."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = right >> 1 ^ POLYNOMIAL if right & 1 else right >> 1
    return product
