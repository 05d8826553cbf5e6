"""An ``IterableDataset`` over tars that each worker reads whole: what users write by hand around a file reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from benchmarks.peers.tar_samples import tar_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SplitTars(IterableDataset[dict[str, Any]]):
    """Worker w of W reads tars w, w + W, …

    Args:
        urls: The tars.
        opener: Makes a file object, readable forward, of one of them.
    """

    def __init__(self, urls: list[str], opener: Callable[[str], Any]) -> None:
        self._urls = urls
        self._opener = opener

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples as dicts."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for url in self._urls[worker::workers]:
            with self._opener(url) as file:
                for key, payload in tar_samples(file):
                    yield {"key": key, "bin": payload}
