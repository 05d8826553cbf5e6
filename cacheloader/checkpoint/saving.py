"""One save on its way: in the foreground, in a thread or in a process, up to its commit or its failure."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from cacheloader.checkpoint.failure import innermost
from cacheloader.errors import ConfigError, SaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.checkpoint.planner import SavePlanner

    from cacheloader.checkpoint.ranks import Ranks
    from cacheloader.checkpoint.storage import CommitWriter

Mode = Literal["sync", "thread", "process"]


def check_mode(mode: str) -> None:
    """Refuse a mode that does not exist, or not in this torch.

    Raises:
        ConfigError: It does not.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f'mode={mode!r} is none; pass "sync", "thread" or "process"')
    if mode == "process" and not hasattr(state_dict_saver, "AsyncCheckpointerType"):
        raise ConfigError('mode="process" needs torch 2.7 or newer; pass mode="thread"')


class Save:
    """A save that has begun.

    Args:
        step: Training step.
        settle: Called once when torch is done, in the thread that saved; what it raises becomes the save's failure.
    """

    def __init__(self, *, step: int, settle: Callable[[BaseException | None], None]) -> None:
        self.step = step
        self._settle = settle
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run(
        self, state: Mapping[str, Any], writer: CommitWriter, planner: SavePlanner, ranks: Ranks, *, mode: Mode
    ) -> None:
        """Begin; returns when the state has been copied, or in mode ``sync`` when all is over."""
        ranks.hush()
        options: dict[str, Any] = {
            "storage_writer": writer,
            "planner": planner,
            "process_group": ranks.saving,
        }
        if mode == "sync":
            failure: BaseException | None = None
            try:
                state_dict_saver.save(dict(state), **options)
            except (Exception, CheckpointException) as error:  # noqa: BLE001  (raised by result(), as in other modes)
                failure = error
            self._finish(failure)
            return
        if mode == "process":
            options["async_checkpointer_type"] = state_dict_saver.AsyncCheckpointerType.PROCESS
        try:
            future: Any = state_dict_saver.async_save(dict(state), **options)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  (raised by result())
            self._finish(error)
            return
        future.add_done_callback(lambda done: self._finish(done.exception()))

    def _finish(self, failure: BaseException | None) -> None:
        try:
            self._settle(failure)
        except Exception as error:  # noqa: BLE001  (kept for result())
            failure = failure or error
        if failure is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(failure)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in a commit or not."""
        return self._done.done()

    def result(self, *, timeout_s: float) -> None:
        """Wait for the end.

        Raises:
            SaveFailed: It did not end in a commit, or not in time.
        """
        try:
            self._done.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise SaveFailed(
                f"the save of step {self.step} has not ended within {timeout_s:.0f} s; if the store is that slow, pass "
                "a larger timeout_s="
            ) from error
        except BaseException as error:
            raise SaveFailed(
                f"the save of step {self.step} did not end in a commit and will not be resumed from "
                f"({innermost(error)}); the last committed checkpoint is untouched"
            ) from error
