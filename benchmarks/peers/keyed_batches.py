"""What peers have in common whose batches are a dict of keys and payloads. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class KeyedBatches:
    """A loader of batches ``{"key": [...], "bin": [...]}``; a subclass may call the keys something else.

    Args:
        decode: Whether the loader turns each payload into pixels; then ``"bin"`` is a tensor of them.
    """

    key_field = "key"

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

            return decoded_items(batch[self.key_field], batch["bin"])
        return zip(batch[self.key_field], batch["bin"], strict=True)

    def close(self) -> None:
        """Nothing was started that outlives the process."""
