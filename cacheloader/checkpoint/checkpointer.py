"""``Checkpointer``: saves in the background, and a restart that finds the newest checkpoint that can be trusted."""

from __future__ import annotations

import datetime
import logging
import operator
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import cacheloader
from cacheloader.checkpoint import foreign, snapshot, survey
from cacheloader.checkpoint.commit import Commit
from cacheloader.checkpoint.failure import innermost
from cacheloader.checkpoint.neighbours import Neighbours
from cacheloader.checkpoint.ranks import Ranks
from cacheloader.checkpoint.restoring import StartOver, Verify, choose
from cacheloader.checkpoint.retention import Retention
from cacheloader.checkpoint.saving import Mode, Save, check_mode
from cacheloader.checkpoint.staging import Staging
from cacheloader.checkpoint.stopping import EXIT_STATUS, StopSignal
from cacheloader.checkpoint.storage import CheckpointReader, CommitWriter, FirstRankPlanner, PlainPlanner
from cacheloader.checkpoint.store import open_store
from cacheloader.checkpoint.verify import read_commit
from cacheloader.errors import CheckpointError, ConfigError, SaveFailed
from cacheloader.goodput import recorder

if TYPE_CHECKING:
    import os
    import signal
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from cacheloader.checkpoint.commit import Name
    from cacheloader.checkpoint.restoring import Skipped

logger = logging.getLogger(__name__)

GRACE_S = 60.0
"""How long a training loop that has failed waits for a save that is under way."""


class Checkpointer:
    """Saves and restores a training job: model, optimizer, loader position, random states, and what else is named.

    Making one is collective: every rank does it, after ``init_process_group``.

    Args:
        url: The job's own folder: a path or a URL that fsspec knows. All ranks see the same.
        model: Plain, DDP or FSDP2 (``fully_shard``).
        optimizer: One or several, of ``model``.
        loader: A ``cacheloader.DataLoader``, or another object with ``state_dict()`` equal on all ranks.
        mode: ``"thread"`` and ``"process"`` copy the state and write in the background, ``"sync"`` waits.
        keep_last: Delete older checkpoints but this many; ``None`` keeps all.
        keep_every: Beside those, keep each whose step is a multiple of this.
        verify: What a restart reads before it believes a checkpoint: all ``"bytes"``, or ``"sizes"`` only.
        start_over: When a job with saves, none of which can be resumed from, begins at step 0: ``"never"``,
            ``"if_never_committed"`` (no save was ever completed, so there is nothing to lose), or ``"always"``.
        stop_signal: A signal, such as ``signal.SIGTERM``, after which ``exit_if_stopped`` saves and leaves.
        storage_options: What fsspec's file system takes.
        thread_count: Files that each rank writes side by side.
        timeout_s: Longest wait for other ranks and for a save, in seconds.
        **others: More modules, and objects with ``state_dict`` and ``load_state_dict`` that are equal on all ranks:
            scheduler, scaler, counters.

    Attributes:
        last_stall_s: Time that the training thread spent in the latest ``save``, in seconds.
        skipped: Saves that ``restore_latest`` passed over, with reasons.

    Raises:
        ConfigError: An option cannot work.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loader: Any = None,
        mode: Mode = "thread",
        keep_last: int | None = None,
        keep_every: int | None = None,
        verify: Verify = "bytes",
        start_over: StartOver = "never",
        stop_signal: signal.Signals | None = None,
        storage_options: Mapping[str, Any] | None = None,
        thread_count: int = 1,
        timeout_s: float = 1800.0,
        **others: Any,
    ) -> None:
        check_mode(mode)
        for name, value, choices in (("verify", verify, Verify), ("start_over", start_over, StartOver)):
            if value not in get_args(choices):
                raise ConfigError(f"{name}={value!r} is none of {', '.join(map(repr, get_args(choices)))}")
        if thread_count < 1 or timeout_s <= 0:
            raise ConfigError(f"thread_count={thread_count} and timeout_s={timeout_s} have to be above 0")
        objects = {"loader": loader, **others} if loader is not None else dict(others)
        optimizers = [] if optimizer is None else optimizer
        self._contents = snapshot.Contents(
            modules={"model": model} | {name: it for name, it in objects.items() if isinstance(it, nn.Module)},
            optimizers=[optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers),
            others={name: it for name, it in objects.items() if not isinstance(it, nn.Module)},
        )
        self._retention = Retention(keep_last=keep_last, keep_every=keep_every)
        self._mode: Mode = mode
        self._verify: Verify = verify
        self._start_over: StartOver = start_over
        self._thread_count = thread_count
        self._timeout_s = timeout_s
        self._store = open_store(url, storage_options)
        self._staging = Staging(shared=mode == "process")
        self._ranks = Ranks(timeout_s=timeout_s)
        if mode == "process" and not self._ranks.is_distributed:
            raise ConfigError(
                'mode="process" saves through processes that form a group like the job\'s, and there is none; call '
                'init_process_group first, or pass mode="thread"'
            )
        self._last: Save | None = None
        self._committed: int | None = None
        self._good: set[Name] = set()
        self._bad: set[Name] = set()
        self._unreadable: set[Name] = set()
        self.last_stall_s = 0.0
        self.skipped: tuple[Skipped, ...] = ()
        self._neighbours: Neighbours | None = None  # on rank 0 only
        newest, self._attempt = self._ranks.from_first(self._begin_attempt)
        self._next_serial = newest + 1
        self._may_save = not newest or start_over == "always"
        self._stop = None if stop_signal is None else StopSignal(stop_signal)

    def _begin_attempt(self) -> tuple[int, str]:
        """On rank 0: the newest serial, and a name of this attempt."""
        attempt = secrets.token_hex(4)
        try:
            there = survey.names(self._store)
            self._neighbours = Neighbours(
                self._store, attempt=attempt, there=there, sees_changes=not self._retention.keeps_all
            )
        except Exception as error:
            raise CheckpointError(
                f"{self._store} cannot be listed ({innermost(error)}); name a folder that this job may read and write"
            ) from error
        return max((name.serial for name in there), default=0), attempt

    @property
    def committed_step(self) -> int | None:
        """The step of the latest checkpoint of this process that is known to be committed, or was restored."""
        return self._committed

    def save(self, step: int, *, mode: Mode | None = None) -> None:
        """Save the state after ``step`` training steps. Every rank calls it, with the same step.

        Returns when the state has been copied; the rest goes on in the background (not in mode ``"sync"``). Saves do
        not overlap: one that is still under way is waited for.

        Args:
            step: Steps that are complete.
            mode: Another mode, this once.

        Raises:
            SaveFailed: This save, or the one before it, did not end in a commit. Saving again is possible.
                What fails on one rank is raised on every rank.
            ConfigError: There are checkpoints and ``restore_latest`` was not called, a state is no plain data, or the
                step is no whole number from 0.
        """
        begin = time.perf_counter()
        mode = mode or self._mode
        check_mode(mode)
        if not hasattr(step, "__index__") or (step := operator.index(step)) < 0:
            raise ConfigError(f"step={step!r} is no number of steps; pass how many are complete, a whole number from 0")
        if not self._may_save:
            raise ConfigError(
                f"{self._store} holds saves of an earlier attempt and restore_latest() was not called; call it before "
                'training, or pass start_over="always" to leave them behind'
            )
        draft = Commit(
            serial=self._next_serial,
            step=step,
            attempt=self._attempt,
            world_size=self._ranks.world_size,
            saved_at=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            versions={"torch": torch.__version__, "cacheloader": cacheloader.__version__},
            files={},
        )
        name = str(draft.name)
        recorder.ckpt_begin(name, step)
        try:
            # Whatever fails on one rank alone has to stop all of them here: behind it torch's collectives begin.
            self._wait_together()
            state = self._ranks.together(
                f"taking the state of step {step}",
                lambda: snapshot.capture(self._contents, step=step, rank=self._ranks.rank),
            )
            self._next_serial += 1
        except BaseException as error:  # the account has to know that training goes on, if it does
            recorder.ckpt_staged(name, step, stall_s=time.perf_counter() - begin)
            recorder.ckpt_fail(name, step, error=innermost(error))
            raise
        staging = None if mode == "sync" else self._staging
        writer = CommitWriter(self._store, draft, staging=staging, thread_count=self._thread_count)
        self._last = Save(step=step, settle=lambda failure: self._settle(draft, failure))
        planner = FirstRankPlanner(snapshot.buffers(self._contents, state))
        self._last.run(state, writer, planner, self._ranks, mode=mode)
        self.last_stall_s = time.perf_counter() - begin
        recorder.ckpt_staged(name, step, stall_s=self.last_stall_s)
        if mode == "sync":
            self._wait_together()

    def _settle(self, draft: Commit, failure: BaseException | None) -> None:
        """On each rank when a save is over, in the thread that saved."""
        name = str(draft.name)
        if failure is not None:
            logger.error("the save of step %d failed: %s", draft.step, innermost(failure))
            recorder.ckpt_fail(name, draft.step, error=innermost(failure))
            return
        if self._ranks.is_first:
            commit = read_commit(self._store, name)  # seen in the store, not believed
            self._good.add(draft.name)
            recorder.ckpt_commit(name, draft.step, size_bytes=commit.size_bytes, manifest_hash=commit.digest)
        self._committed = draft.step
        if self._neighbours is not None:
            try:
                spared = self._unreadable | self._neighbours.saves()
                if self._retention.keeps_all:
                    return
                gone = survey.thin_out(self._store, self._retention, bad=self._bad, spared=spared, good=self._good)
            except Exception as error:  # noqa: BLE001  (the save is good; old ones can go next time)
                logger.warning("old checkpoints could not be deleted: %s", innermost(error))
                return
            for old in gone:
                recorder.ckpt_delete(str(old), old.step)

    def wait(self) -> None:
        """Wait until the save under way is over.

        Raises:
            SaveFailed: It did not end in a commit; said once.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result(timeout_s=self._timeout_s)

    def _wait_together(self) -> None:
        """``wait`` on every rank: a save that failed on any failed on all."""
        step = self._last.step if self._last else -1
        self._ranks.together(f"the save of step {step}", self.wait)

    def restore_latest(self, *, max_step: int | None = None) -> int:
        """Put the newest checkpoint that verifies into all objects; collective.

        Args:
            max_step: Pass over later steps, to go back to before a loss spike. What is saved from there on counts as
                newer than what was passed over.

        Returns:
            Its step; 0 if the job has no saves yet. Checkpoints of other tools are none, and warned of.

        Raises:
            NoValidCheckpoint: There are saves, or were, and none can be resumed from.
            CheckpointError: The chosen one does not fit the objects, or cannot be read.
        """
        self._wait_together()
        with _phase("ckpt_find"):
            choice = choose(
                self._store, self._ranks, verify=self._verify, start_over=self._start_over, max_step=max_step
            )
        self.skipped = choice.skipped
        self._bad |= choice.bad
        self._unreadable |= choice.unreadable
        if self._ranks.is_first:
            for one in choice.skipped:
                logger.warning("passed over %s", one)
            if choice.commit is None and not choice.skipped and self._start_over != "always":
                self._warn_of_others()
        step, name, saved_ranks = 0, "", 0
        if choice.commit is not None:
            with _phase("ckpt_read"):
                step = self._load(choice.commit)
            name, saved_ranks = str(choice.commit.name), choice.commit.world_size
            self._committed = step
            if self._ranks.is_first:
                logger.info("resumed from %s/%s, step %d", self._store, name, step)
        self._may_save = True
        skipped = [(one.name, one.reason) for one in choice.skipped]
        recorder.restore(name, step, skipped=skipped, world_old=saved_ranks)
        return step

    def _warn_of_others(self) -> None:
        """Step 0 beside checkpoints of another tool is seldom what was meant."""
        try:
            others = foreign.newest_first(self._store)
        except Exception as error:  # noqa: BLE001  (only a warning is at stake)
            logger.warning("%s cannot be searched for checkpoints of other tools: %s", self._store, innermost(error))
            return
        if others:
            logger.warning(
                "%s holds no save of cacheloader, so this job starts at step 0, but %d of other tools, %s (%s) first: "
                "to go on from it, load it with the tool that wrote it, or with torch.distributed.checkpoint.load, "
                "before training; the first save() is then one that restore_latest() finds",
                self._store,
                len(others),
                *others[0],
            )

    def _load(self, commit: Commit) -> int:
        folder, world = str(commit.name), self._ranks
        reader = CheckpointReader(self._store, folder)
        shape = {"rank": world.rank, "world_size": world.world_size, "saved_ranks": commit.world_size}
        state = world.together(
            f"reading {folder}/.metadata",
            lambda: snapshot.template(self._contents, reader.read_metadata(), **shape),
        )
        world.hush()
        try:
            load(state, storage_reader=reader, planner=PlainPlanner(), process_group=world.decisions)
        except CheckpointException as error:
            raise CheckpointError(f"{self._store}/{folder} cannot be loaded ({innermost(error)})") from error
        step = world.together(f"restoring from {folder}", lambda: snapshot.apply(self._contents, state, **shape))
        if step != commit.step:
            raise CheckpointError(
                f"{self._store}/{folder} says that it is step {commit.step} and holds step {step}; remove it"
            )
        return step

    def exit_if_stopped(self, step: int) -> None:
        """If any rank was asked to stop, save in the foreground and leave with status 75, on all ranks after one step.

        Call it on every rank after each step, or each few steps: it costs one small all_reduce.

        Args:
            step: Steps that are complete.

        Raises:
            SystemExit: The job was asked to stop, and its state is committed.
            ConfigError: No ``stop_signal`` was given.
        """
        if self._stop is None:
            raise ConfigError("exit_if_stopped() needs a signal to look for; pass stop_signal=signal.SIGTERM")
        if not self._ranks.any(self._stop.came):
            return
        try:
            self._wait_together()
        except SaveFailed as error:
            logger.warning("%s; saving once more before leaving", error)
        if self._ranks.any(self._committed != step):
            self.save(step, mode="sync")
        self.close()
        raise SystemExit(EXIT_STATUS)

    def close(self) -> None:
        """Wait for the save under way and give everything back.

        Raises:
            SaveFailed: It did not end in a commit.
        """
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        if self._stop is not None:
            self._stop.close()
        self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        # The loop has failed and its error is the news; a save that is nearly done is still worth having.
        last, self._last = self._last, None
        if last is not None:
            grace_s = min(GRACE_S, self._timeout_s)
            if not last.is_over:  # Python prints the error only behind this wait, and some launchers kill before
                logger.warning(
                    "training failed (%s); waiting up to %.0f s for the save of step %d, which is under way",
                    kind.__name__ if error is None else innermost(error),
                    grace_s,
                    last.step,
                )
            try:
                last.result(timeout_s=grace_s)
            except SaveFailed as failure:
                logger.warning("%s", failure)
        if self._stop is not None:
            self._stop.close()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Tells the goodput account, if there is one, what this time goes to."""
    recorder.emit("phase.begin", phase=name)
    try:
        yield
    finally:
        recorder.emit("phase.end", phase=name)
