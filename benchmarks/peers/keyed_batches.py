"""What peers have in common whose batches are a dict of keys and payloads. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class KeyedBatches:
    """A loader of batches ``{"key": [...], "bin": [...]}``.

    Args:
        decode: Whether the loader turns each payload into pixels; then ``"bin"`` is a tensor of them.
    """

    def __init__(self, *, decode: bool = False) -> None:
        self._workers = 0
        self._decode = decode

    def count(self, batch: Any) -> tuple[int, int]:
        """Samples and payload bytes."""
        payloads = batch["bin"]
        if self._decode:
            return len(payloads), payloads.numel()
        return len(payloads), sum(map(len, payloads))

    def items(self, batch: Any) -> Iterator[tuple[str, bytes]]:
        """Key and payload of each sample."""
        if self._decode:
            from benchmarks.peers.decoding import decoded_items

            return decoded_items(batch["key"], batch["bin"])
        return zip(batch["key"], batch["bin"], strict=True)

    def close(self) -> None:
        """Nothing was started that outlives the process."""
