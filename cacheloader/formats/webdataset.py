"""WebDataset: tar shards whose members form samples by name, grouped exactly as the ``webdataset`` package does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader.formats.grouping import Grouping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.formats.base import ByteSource
    from cacheloader.formats.webdataset_reader import WebDatasetReader


class WebDatasetFormat:
    """Tar shards; a sample is a run of members with the same name up to the first dot of the file name."""

    name = "webdataset"
    suffixes = (".tar",)
    is_ranges = True

    def build_index(self, data: ByteSource, *, uri: str) -> bytes:
        """Where each sample lies (see ``ShardFormat.build_index``).

        A field that appears twice in one sample is an error, as in webdataset: which of the two is meant is anybody's
        guess.
        """
        return Grouping(uri).index(data)

    def open(
        self, data: ByteSource, index: bytes, *, uri: str, columns: Sequence[str] | None = None
    ) -> WebDatasetReader:
        """A reader over ``data`` (see ``ShardFormat.open``)."""
        # Imported late: who makes indexes needs neither this nor numpy.
        from cacheloader.formats.webdataset_reader import WebDatasetReader

        return WebDatasetReader(data, index, uri=uri, columns=columns)
