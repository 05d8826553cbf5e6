"""``DataLoader``: torch's own, with an exact position and the waiting time of each batch."""

from __future__ import annotations

import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cacheloader.ahead import ReadAhead
from cacheloader.batches import Collate, WholeBatches, unpacked
from cacheloader.blocks import Blocks
from cacheloader.device import to_device
from cacheloader.errors import CacheloaderError, ConfigError
from cacheloader.goodput import recorder as goodput
from cacheloader.positioned import PositionedDataset
from cacheloader.records import Records
from cacheloader.workers import leave_sigterm_to_training, lost_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cacheloader.batches import Note
    from cacheloader.cursor import Start
    from cacheloader.state import Policy
    from cacheloader.transport.reporting import RunWatch

_PREFETCH = 2  # torch's own default
_LEAST_THREADS = 2
_SLOW_FETCH_S = 0.1
_SPARE_BLOCKS = 2  # beyond those on their way: the batch in use, and one that is copied to a device meanwhile


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader over a ``RemoteDataset``.

    Each iteration is one epoch, complete or not. The position counts batches that the training loop has taken, never
    those that workers have read ahead.

    Where there is nothing to compute (no ``transform``), threads of the training process read the batches ahead. With
    neither ``collate_fn`` nor ``worker_init_fn`` nor ``pin_memory`` there would be nothing for worker processes to do,
    and ``num_workers`` is the number of those threads, at least two.

    Args:
        dataset: What to read.
        batch_size: Samples per batch and rank.
        collate_fn: Makes a batch of a list of samples, in the worker; torch's default stacks tensors and groups fields.
        device: Move each batch there, on a stream of its own while the step before it computes.
        record_to: A folder, of this loader alone, to which every rank appends one line a batch as it is handed out;
            ``cacheloader audit`` reads it.
        record_keys: Whether those lines name each sample, too, by its number in the data set.
        **options: Everything else that torch's DataLoader takes, but ``shuffle``, ``sampler``, ``batch_sampler`` and
            ``drop_last``: the order belongs to the data set.

    Attributes:
        last_fetch_seconds: Time that the training thread spent inside ``next()`` for the latest batch, in seconds.
        num_skipped: Samples that the transform left out so far, by returning ``SKIP``.
        num_bad_samples: Samples that were left out since the transform failed on them.

    Raises:
        ConfigError: An option that would change the order was passed, or ``record_to`` cannot be.
    """

    last_fetch_seconds: float = 0.0
    num_skipped: int = 0
    num_bad_samples: int = 0

    def __init__(
        self,
        dataset: PositionedDataset,
        batch_size: int = 1,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str | torch.device | None = None,
        record_to: str | Path | None = None,
        record_keys: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, PositionedDataset):
            raise ConfigError(
                f"cacheloader.DataLoader reads a RemoteDataset and got {type(dataset).__name__}; "
                "use torch.utils.data.DataLoader for other data sets"
            )
        for name, instead in (
            ("shuffle", "RemoteDataset(shuffle=…)"),
            ("sampler", "RemoteDataset(seed=…)"),
            ("batch_sampler", "batch_size"),
            ("drop_last", 'RemoteDataset(tail="drop"|"pad"|"keep")'),
        ):
            if options.pop(name, None):
                raise ConfigError(f"{name} would change an order that belongs to the data set; use {instead} instead")
        dataset.set_batch_size(batch_size)
        dataset.num_batches()  # a batch size that the lanes or the world cannot share fails here, not in a worker
        self._positioned = dataset
        self._device = None if device is None else torch.device(device)
        self._delivered = 0
        self._records = None if record_to is None else Records(Path(record_to), dataset)
        self._reporter = dataset.fetch_reporter()
        # Whole batches come from the data set, so that one from which samples were left out is shorter and the next
        # still begins where it should; torch's own batching would fill it up.
        self._whole = WholeBatches(dataset)
        prefetch = (options.get("prefetch_factor") or _PREFETCH) * max(1, options.get("num_workers", 0))
        self._is_threaded = dataset.is_raw and (
            not options.get("num_workers")
            or not (collate_fn or any(options.get(name) for name in ("worker_init_fn", "pin_memory", "timeout")))
        )
        if self._is_threaded:
            num_threads = max(options.get("num_workers", 0), _LEAST_THREADS)
            self._whole.read_ahead = ReadAhead(num_threads=num_threads, num_batches=max(prefetch, num_threads + 1))
        self._collate = Collate(collate_fn, with_keys=record_to is not None and record_keys)
        collate: Callable[[Any], Any] = self._collate
        if options.get("generator") is None:
            # At each iteration torch draws a seed for the workers, from the global generator by default: a resumed job,
            # which begins one iteration more, would draw other numbers in its dropout than one that never stopped.
            options["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        options["worker_init_fn"] = partial(leave_sigterm_to_training, options.get("worker_init_fn"))
        super().__init__(self._whole, batch_size=None, collate_fn=collate, **options)

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank."""
        return self._positioned.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Torch's constructor says ``None`` here, since it is not the one that batches."""

    @property
    def epoch(self) -> int:
        """The epoch under way, or the coming one if the last is complete."""
        return self._positioned.position_after(self._delivered).epoch

    def __len__(self) -> int:
        """Batches in a full epoch."""
        return self._positioned.num_batches()

    def __iter__(self) -> Any:
        self._positioned.restart_after(self._delivered)
        self._delivered = 0
        iteration, start = self._positioned.open_iteration()
        if self._records:
            self._records.begin(start, num_workers=self.num_workers)
        self._whole.start = start
        batches: Any
        if self._is_threaded and not self.pin_memory:
            batches = self._whole.made(self._collate)
        else:
            if self.num_workers and self._iterator is None:  # or its workers live on, and know theirs
                per_worker = (self.prefetch_factor or _PREFETCH) + _SPARE_BLOCKS
                self._collate.blocks = Blocks(num_workers=self.num_workers, per_worker=per_worker)
            batches = super().__iter__()
        return _TimedIterator(self, batches, start, iteration)

    def watch_run(self, path: Path, *, run: str, attempt: str, rank: int, world: int) -> RunWatch:
        """Have the node's daemon watch this rank of a training run; ``goodput.Run`` asks for it."""
        return self._reporter.watch(path, run=run, attempt=attempt, rank=rank, world=world)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that this loader has handed out; plain types, equal on all ranks.

        Safe in a signal handler: it asks no worker and waits for nothing.

        Raises:
            ConfigError: Batches come as they are ready (``in_order=False``) and some of the epoch are still to come.
        """
        is_out_of_order = self.num_workers > 0 and not self._is_in_order and not self._is_threaded
        if is_out_of_order and self._delivered and self.epoch == self._positioned.epoch:
            raise ConfigError(
                "in_order=False hands out batches as they come, so that no position lies between those handed out and "
                "those to come; use in_order=True, or save at the end of an epoch"
            )
        return self._positioned.state_dict(self._delivered)

    def load_state_dict(self, saved: Mapping[str, Any], *, on_mismatch: Mapping[str, Policy] | None = None) -> None:
        """Let the next iteration go on at a saved position; see ``RemoteDataset.load_state_dict``."""
        self._positioned.load_state_dict(saved, on_mismatch=on_mismatch)
        self._delivered = 0

    @property
    def _is_in_order(self) -> bool:
        return bool(getattr(self, "in_order", True))  # torch before 2.6 knows no other way

    def _took(self, note: Note, fetch_seconds: float, *, due: tuple[int, int]) -> None:
        if (note.epoch, note.row) != due and self._is_in_order:
            raise CacheloaderError(
                f"the batch at row {note.row} of epoch {note.epoch} came in place of that at row {due[1]} of epoch "
                f"{due[0]}, which was lost in an interrupted next(); resume from loader.state_dict()"
            )
        self.last_fetch_seconds = fetch_seconds
        self.num_skipped += note.num_skipped
        self.num_bad_samples += note.num_bad
        self._reporter.add(fetch_seconds, note.num_samples)
        run = goodput.active()
        if run is not None:
            # Worth its milliseconds only where there was something to wait for.
            is_slow = fetch_seconds >= _SLOW_FETCH_S
            asked = time.perf_counter()
            shards = self._positioned.shards_at(epoch=note.epoch, row=note.row) if is_slow else []
            source = ", ".join(uri.rpartition("/")[2] for uri in shards[:3])
            waited = fetch_seconds + time.perf_counter() - asked  # the loop waits for the answer, too
            run.fetched(self, waited, note.num_samples, epoch=note.epoch, source=source)
        if self._records:
            self._records.step(fetch_s=fetch_seconds, **note._asdict())


class _TimedIterator:
    """Counts the batches that reach the training loop and times each ``next()``."""

    def __init__(self, loader: DataLoader, workers: Any, start: Start, iteration: int) -> None:
        self._loader = loader
        self._workers: Any = workers
        self._blocks = loader._collate.blocks  # batches on their way lie in them
        batches: Iterator[tuple[Any, Note]] = map(unpacked, workers)
        self._batches = to_device(batches, loader._device) if loader._device else batches
        self._start = start
        self._iteration = iteration
        self._rows = loader._positioned.rows_per_step()
        self._is_over = self._has_failed = False

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        loader, dataset = self._loader, self._loader._positioned
        if self._has_failed or not dataset.is_under_way(self._iteration):
            raise ConfigError(
                "this iteration has failed or was interrupted; loader.load_state_dict(loader.state_dict()) and a new "
                "one try again"
                if self._has_failed
                else "another iteration has begun since, or the position was moved, and this one no longer counts; "
                "go on with a new iter(loader)"
            )
        run = goodput.active()
        if run is not None:
            run.fetching(loader)
        begin = time.perf_counter()
        try:
            data, note = next(self._batches)
            loader._took(note, time.perf_counter() - begin, due=self._due())
        except StopIteration:
            self._is_over = True
            if run is not None:
                run.exhausted(loader)
            loader._reporter.flush()
            dataset.end_iteration()
            loader._delivered = 0
            self._let_go()
            raise
        except Exception as error:
            self._has_failed = True
            if loader.num_workers:
                # torch's frames keep the error that they raise, and with it, in a cycle, the workers.
                traceback.clear_frames(error.__traceback__)
            self._raise_lost_worker(error)
            raise
        except BaseException:
            # Ctrl-C: a generator is at its end after it, and a worker's pipe may have lost half a message.
            self._has_failed = True
            loader._iterator = None
            raise
        finally:
            if self._has_failed:
                self._batches, self._workers = iter(()), None  # ends the other workers
        # Nothing is called behind this line, so that no signal handler can raise between the count and the loop.
        loader._delivered += 1
        return data

    def _let_go(self) -> None:
        """Nothing more will arrive in these blocks, unless their workers live on."""
        if self._loader._iterator is None and self._loader._collate.blocks is self._blocks:
            self._loader._collate.blocks = None
        self._blocks = None

    def _due(self) -> tuple[int, int]:
        return self._start.epoch, self._start.row + self._loader._delivered * self._rows

    def _raise_lost_worker(self, error: Exception) -> None:
        if not isinstance(error, RuntimeError):
            return
        loader, start = self._loader, self._start
        lost = lost_worker(
            error,
            self._workers,
            loader._positioned,
            epoch=start.epoch,
            row=start.row,
            num_taken=loader._delivered,
        )
        if lost is None:
            return
        loader._iterator = None  # persistent workers without this one are of no use to a later iteration
        try:
            raise lost from error
        finally:
            del lost  # or the error, through its own traceback, would keep itself and the workers alive
