"""webdataset with its own cache, or streaming."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measurement import OPENED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.harness.contestant import Store, Task
    from benchmarks.harness.meter import PhaseClock

FIELD = "bin"
_STREAM_BYTES = 4 << 20


class WebdatasetLoader:
    """``WebLoader`` over a ``WebDataset``, batches made in the workers.

    Args:
        cached: Whether to keep shards in ``cache_dir``.
        opener: How shards are opened: ``"curl"`` through a pipe, as webdataset's documentation shows for S3, or a
            handler of its ``gopen`` hook that streams with ``"boto3"`` or ``"obstore"``.
        decode: Whether ``map_tuple`` turns each payload into pixels.
    """

    def __init__(self, *, cached: bool, opener: str = "obstore", decode: bool = False) -> None:
        self._decode = decode
        self.is_cached = cached
        self._opener = opener
        self._workers = 0

    def prepare(self, task: Task) -> None:
        """Import, and register the opener."""
        import webdataset

        self._workers = task.num_workers
        _ = webdataset.WebLoader
        if self._opener != "curl":
            openers = {"boto3": _open_boto3, "obstore": _open_obstore}
            origin, open_object = task.origin(), openers[self._opener]
            schemes = sys.modules["webdataset.gopen"].gopen_schemes

            def handler(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:
                del mode, bufsize
                bucket, _slash, key = url.removeprefix("s3://").partition("/")
                return open_object(origin, bucket, key)

            schemes["s3"] = handler

    def open(self, task: Task, clock: PhaseClock) -> Iterable[Any]:
        """Make data set and loader."""
        import webdataset as wds

        cache_dir = f"{task.folder}/cache"
        if self.is_cached:
            import os

            os.makedirs(cache_dir, exist_ok=True)  # noqa: PTH103  (ranks share it)
        dataset = wds.WebDataset(
            [self._url(task.origin(), name) for name in task.shard_names],
            shardshuffle=len(task.shard_names),
            nodesplitter=wds.split_by_node,
            cache_dir=cache_dir if self.is_cached else None,
        ).to_tuple("__key__", FIELD)
        if self._decode:
            from benchmarks.peers.decoding import decode

            dataset = dataset.map_tuple(None, decode)
        dataset = dataset.batched(task.batch_size)
        loader: Iterable[Any] = wds.WebLoader(
            dataset, batch_size=None, num_workers=task.num_workers, persistent_workers=task.num_workers > 0
        )
        clock.mark(OPENED)
        return loader

    def count(self, batch: Any) -> tuple[int, int]:
        """Samples and payload bytes."""
        payloads = batch[1]
        if self._decode:
            return len(payloads), payloads.numel()
        return len(payloads), sum(map(len, payloads))

    def items(self, batch: Any) -> Iterator[tuple[str, bytes]]:
        """Key and payload of each sample."""
        if self._decode:
            from benchmarks.peers.decoding import decoded_items

            return decoded_items(*batch)
        return zip(*batch, strict=True)

    def close(self) -> None:
        """Nothing was started that outlives the process."""

    @property
    def configuration(self) -> dict[str, Any]:
        """How it was set up."""
        return {
            "loader": "WebLoader(WebDataset.to_tuple.batched), shards shuffled, samples not",
            "cache": "cache_dir" if self.is_cached else "none",
            "opener": self._opener,
            "workers": f"{self._workers}, persistent",
        }

    def _url(self, origin: Store, name: str) -> str:
        if self._opener != "curl":
            return f"s3://{origin.bucket}/{origin.prefix}{name}"
        return (
            f"pipe:curl -s --fail --aws-sigv4 aws:amz:{origin.region}:s3 --user {origin.key}:{origin.secret} "
            f"{origin.endpoint_url}/{origin.bucket}/{origin.prefix}{name}"
        )


def _open_boto3(origin: Store, bucket: str, key: str) -> Any:
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=origin.endpoint_url,
        aws_access_key_id=origin.key,
        aws_secret_access_key=origin.secret,
        region_name=origin.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    return client.get_object(Bucket=bucket, Key=key)["Body"]


def _open_obstore(origin: Store, bucket: str, key: str) -> Any:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        endpoint=origin.endpoint_url,
        access_key_id=origin.key,
        secret_access_key=origin.secret,
        region=origin.region,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    return _Stream(iter(obstore.get(store, key).stream(min_chunk_size=_STREAM_BYTES)))


class _Stream:
    """Chunks as a file that is read from start to end."""

    def __init__(self, chunks: Iterator[Any]) -> None:
        self._chunks = chunks
        self._buffer = memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        parts = []
        while size:
            if not self._buffer:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._buffer = memoryview(chunk)
            part = self._buffer if size < 0 else self._buffer[:size]
            self._buffer = self._buffer[len(part) :]
            parts.append(part)
            size -= len(part) if size > 0 else 0
        return b"".join(parts)

    def close(self) -> None:
        self._chunks = iter(())

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
