"""What torch.distributed.checkpoint writes to and reads from: a store, with a checksum of every byte on its way."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import google_crc32c
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from cacheloader.checkpoint.commit import COMMIT_FILE, Part, encode
from cacheloader.checkpoint.survey import ONCE_FILE
from cacheloader.checkpoint.torch_metadata import parse_metadata
from cacheloader.checkpoint.verify import read_commit, wrong_size
from cacheloader.errors import CheckpointError

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner
    from torch.futures import Future

    from cacheloader.checkpoint.commit import Commit
    from cacheloader.checkpoint.staging import Staging
    from cacheloader.checkpoint.store import Store

METADATA_FILE = ".metadata"
CHUNK_BYTES = 2**20
_PARTS = MetadataIndex("cacheloader files")
"""Under this index each rank sends the coordinator what it wrote; it is taken out before torch sees it."""


class _Checked:
    """A stream being written, and the checksum of what went through."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size_bytes = 0
        self.crc32c = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = bytes(view[start : start + CHUNK_BYTES])  # google_crc32c takes nothing but bytes
            self.crc32c = google_crc32c.extend(self.crc32c, chunk)
            done = 0
            while done < len(chunk):  # a stream of the operating system may take less
                done += self._stream.write(chunk[done:])
        self.size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """The context that opened the stream closes it, once it knows that nothing failed."""


class StoreFiles(FileSystemBase):
    """torch's idea of a file system over a store; paths are relative to the store's root."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.written: dict[str, Part] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Reading, or writing with a checksum."""
        if mode == "rb":
            with self.store.reading(path) as stream:
                yield stream
            return
        # torch writes .metadata.tmp and renames it; in a store a file appears complete, under its name, or not at all.
        name = path.removesuffix(".tmp")
        with self.store.writing(name) as stream:
            checked = _Checked(stream)
            yield checked
        self.written[name.partition("/")[2]] = Part(size_bytes=checked.size_bytes, crc32c=checked.crc32c)

    def concat_path(self, path: Any, suffix: str) -> str:
        """Join with ``/``."""
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        """Nothing: see ``create_stream``."""

    def init_path(self, path: Any) -> Any:
        """Paths are used as they are."""
        return path

    def mkdir(self, path: Any) -> None:
        """Nothing: a store makes folders with the files in them."""

    def exists(self, path: Any) -> bool:  # noqa: ARG002
        """Never: each save has a folder of its own."""
        return False

    def rm_file(self, path: Any) -> None:
        """Never called, since nothing exists."""
        raise CheckpointError(f"{path} was to be overwritten, and each save has a folder of its own")

    def ls(self, path: Any) -> list[str]:
        """Names of the files in a folder."""
        return sorted(self.store.files(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Every name is good."""
        return True


class CommitWriter(FileSystemWriter):
    """Writes one checkpoint and, when every file has been seen in the store, its commit record.

    Args:
        store: Where checkpoints lie.
        draft: The record to be, still without files.
        staging: Copies the state before a save in the background.
        thread_count: Files that a rank writes side by side.
    """

    def __init__(self, store: Store, draft: Commit, *, staging: Staging | None, thread_count: int) -> None:
        super().__init__("unused", single_file_per_rank=True, sync_files=False, thread_count=thread_count)
        self.fs: StoreFiles = StoreFiles(store)  # type: ignore[assignment]
        self.path = str(draft.name)
        self._draft = draft
        self._staging = staging

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_staging": None}  # it has done its part when the writer travels to a process

    def stage(self, state_dict: Any) -> Any:
        """A copy that training does not change."""
        if self._staging is None:
            raise CheckpointError("a writer without staging memory can only save in the foreground")
        return self._staging.copy(state_dict)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keep the path; torch calls this with the one it was given, which is none."""

    def storage_meta(self) -> StorageMeta:
        """The folder's name, as plain text."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and add its checksums to the results.

        torch drops what fails in its second and later writer threads: the entries are then missing from a
        ``.metadata`` that is written all the same.
        """
        future = super().write_data(plan, planner)
        results: list[WriteResult] = future.value()
        lost = {item.index for item in plan.items} - {result.index for result in results}
        if lost:
            raise CheckpointError(
                f"{len(lost)} values, {min(index.fqn for index in lost)} among them, were not written; the error of "
                "the writer thread is on stderr"
            )
        results.append(WriteResult(index=_PARTS, size_in_bytes=0, storage_data=dict(self.fs.written)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: ``.metadata``, a look at every file, and the commit record."""
        parts: dict[str, Part] = {}
        for result in (result for of_rank in results for result in of_rank):
            if result.index == _PARTS:
                parts.update(result.storage_data)
        super().finish(metadata, [[result for result in rank if result.index != _PARTS] for rank in results])
        parts[METADATA_FILE] = self.fs.written[METADATA_FILE]
        store = self.fs.store
        commit = dataclasses.replace(self._draft, files=parts)
        reason = wrong_size(commit, store.files(str(commit.name)))
        if reason:
            raise CheckpointError(
                f"the save of step {commit.step} is not committed: in {store}/{commit.name} {reason}; "
                "all ranks have to write to one and the same place"
            )
        with store.writing(f"{commit.name}/{COMMIT_FILE}") as stream:
            stream.write(encode(commit))
        if read_commit(store, str(commit.name)) != commit:
            raise CheckpointError(f"{store}/{commit.name}/{COMMIT_FILE} reads back differently than it was written")
        if ONCE_FILE not in store.top():  # only now: see there
            with store.writing(ONCE_FILE) as stream:
                stream.write(b'{"about": "a checkpoint in this folder was committed"}\n')


class CheckpointReader(FileSystemReader):
    """Reads one checkpoint of a store; nothing in it can become code."""

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__("unused")
        self.fs = StoreFiles(store)  # type: ignore[assignment]
        self.path = folder

    def reset(self, checkpoint_id: Any = None) -> None:  # noqa: ARG002
        """Keep the path."""
        self.storage_data = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The record of what is where."""
        with self.fs.create_stream(f"{self.path}/{METADATA_FILE}", "rb") as stream:
            found = parse_metadata(stream.read())
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class FirstRankPlanner(DefaultSavePlanner):
    """torch's planner, but of some values that each rank has in its own version, those of the lowest rank are saved.

    torch takes any rank's. Under DDP the next forward pass spreads rank 0's buffers, so an uninterrupted job goes on
    with those; a job that resumed with another rank's running means would not be the same.

    Args:
        keys: Names of such values in the state.
    """

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__()
        self._keys = keys

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """torch's, after the versions of higher ranks have been left out."""
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in seen]
            seen |= {item.index for item in items if item.index.fqn in self._keys}
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, but for values that are no tensors: they too are loaded without code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value where it belongs."""
        loaded = torch.load(value, weights_only=True, map_location="cpu")
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)

    def create_local_plan(self) -> LoadPlan:
        """torch's, with a message of ours."""
        try:
            return super().create_local_plan()
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit the model or optimizer ({error}); resume with those it was saved from"
            ) from error
