"""The events of a run: one JSON object a line, one file for each attempt and rank, and one for what the daemon saw.

Durations are measured on one process's monotonic clock; the wall clock only places processes beside each other.
An unknown ``ev`` is skipped, so that a newer writer can add some; an unknown ``v`` is refused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cacheloader.errors import ConfigError

FORMAT_VERSION = 1

# Accounts count in 64 bits, so a line with a number beyond these is damaged.
WallNs = Annotated[int, Meta(ge=0, le=2**62)]  # the year 2116
MonoNs = Annotated[int, Meta(ge=-(2**60), le=2**60)]  # 36 years since the boot
Seq = Annotated[int, Meta(ge=-1, le=2**62)]  # the daemon numbers its events by the time
Count = Annotated[int, Meta(ge=-1, le=2**40)]
Width = Annotated[int, Meta(ge=-1, le=2**20)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="ev", gc=False):
    """What every event says.

    Attributes:
        v: ``FORMAT_VERSION``.
        run: Name of the run.
        att: Name of the attempt, one for each launch, the same on all its ranks.
        node: Host.
        rank: Which process; -1 for the daemon.
        world: Ranks of the attempt.
        seq: Number of the event in its file's stream (``att``, ``node``, ``rank``), from 0.
        wall_ns: When, since 1970.
        mono_ns: When, on the monotonic clock of ``boot``.
        boot: Identity of the node's boot; monotonic times of different boots have nothing in common.
        step: Training step that the event is about, -1 for none. The first is 1.
    """

    v: int
    run: str
    att: str
    node: str
    rank: Width
    world: Width
    seq: Seq
    wall_ns: WallNs
    mono_ns: MonoNs
    boot: str = ""
    step: Count = -1


class RunStart(_Event, frozen=True, kw_only=True, tag="run.start", gc=False):
    """The run is paid for from here on."""

    config: str = ""
    dataset: str = ""
    n_devices: Width = 0
    reason: str = ""


class RunEnd(_Event, frozen=True, kw_only=True, tag="run.end", gc=False):
    """The run is over; a later attempt takes it up again."""

    reason: str = ""


class AttemptStart(_Event, frozen=True, kw_only=True, tag="attempt.start", gc=False):
    """One rank has begun.

    Attributes:
        launcher: Who started it; an attempt with the launcher of the one before it is a restart, not a new job.
        process_start_ns: When the process itself started, on the wall clock; 0 if unknown.
    """

    launcher: str = ""
    process_start_ns: WallNs = 0


class AttemptEnd(_Event, frozen=True, kw_only=True, tag="attempt.end", gc=False):
    """One rank has ended.

    Attributes:
        cause: ``"done"``, or what went wrong.
        code: Exit code or negative signal, 0 if all is well.
    """

    cause: str = ""
    code: int = 0


class PhaseBegin(_Event, frozen=True, kw_only=True, tag="phase.begin", gc=False):
    """A part of the time that is no training step begins.

    Attributes:
        phase: ``init``, ``rendezvous``, ``ckpt_find``, ``ckpt_read``, ``loader_restore``, ``warmup``, ``eval`` or any
            other name.
    """

    phase: str


class PhaseEnd(_Event, frozen=True, kw_only=True, tag="phase.end", gc=False):
    """The phase has ended."""

    phase: str


class Step(_Event, frozen=True, kw_only=True, tag="step", gc=False):
    """One training step has been completed, at ``mono_ns``.

    Attributes:
        dur_s: From the moment the loop asked for the batch to the end of the step.
        fetch_s: Time inside ``next(loader)``.
        exposed_s: Part of it during which the device had nothing to do; negative: as long as ``fetch_s``.
        h2d_s: Copies to the device.
        coll_wait_s: Time that this rank waited for slower ones; negative: to be found from ``coll_us``.
        coll_us: Duration of each collective that the training thread sat in, in order, in microseconds.
        tokens: Tokens of this rank in this step.
        samples: Samples likewise.
        first: First sample's number, -1 if not recorded.
        last: Last sample's number.
        epoch: Of the batch, from 0; -1 if unknown.
        source: Where the waiting came from, if the loader knows: the shard that was waited for.
    """

    dur_s: Seconds
    fetch_s: Seconds = 0.0
    exposed_s: Seconds = -1.0
    h2d_s: Seconds = 0.0
    coll_wait_s: Seconds = -1.0
    coll_us: tuple[Count, ...] = ()
    tokens: Count = 0
    samples: Count = 0
    first: Count = -1
    last: Count = -1
    epoch: Count = -1
    source: str = ""


class StepLate(_Event, frozen=True, kw_only=True, tag="step.late", gc=False):
    """What a device told of a step some steps later.

    Attributes:
        of_mono_ns: The step event's ``mono_ns``.
        exposed_s: As in ``Step``; negative if unknown.
        coll_us: As in ``Step``.
    """

    of_mono_ns: MonoNs
    exposed_s: Seconds = -1.0
    coll_us: tuple[Count, ...] = ()


class CkptBegin(_Event, frozen=True, kw_only=True, tag="ckpt.begin", gc=False):
    """The training thread begins to save ``step``."""

    ckpt: str


class CkptStaged(_Event, frozen=True, kw_only=True, tag="ckpt.staged", gc=False):
    """The training thread goes on; it stood still for ``stall_s`` until now."""

    ckpt: str
    stall_s: Seconds
    bytes: int = 0


class CkptCommit(_Event, frozen=True, kw_only=True, tag="ckpt.commit", gc=False):
    """The checkpoint of ``step`` was seen to be whole and durable. Steps up to it are kept from here on."""

    ckpt: str
    bytes: int = 0
    hash: str = ""


class CkptFail(_Event, frozen=True, kw_only=True, tag="ckpt.fail", gc=False):
    """A save came to nothing."""

    ckpt: str
    error: str = ""


class CkptDelete(_Event, frozen=True, kw_only=True, tag="ckpt.delete", gc=False):
    """A checkpoint was removed on purpose."""

    ckpt: str


class Restore(_Event, frozen=True, kw_only=True, tag="restore", gc=False):
    """Training goes on behind ``step``, of a checkpoint that was verified; what came after it is lost.

    Attributes:
        ckpt: Which one, "" for a fresh start at step 0.
        skipped: Newer ones that were passed over, each with the reason.
        world_old: Ranks that wrote it, 0 if unknown.
    """

    ckpt: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    world_old: Count = 0


class Rollback(_Event, frozen=True, kw_only=True, tag="rollback", gc=False):
    """Steps behind ``to_step`` are given up inside an attempt, for instance after a loss spike."""

    from_step: Count
    to_step: Count
    reason: str = ""


class Heartbeat(_Event, frozen=True, kw_only=True, tag="hb", gc=False):
    """What the daemon sees of a rank, every few seconds.

    Attributes:
        of_rank: Which.
        beat_age_s: Time since the rank itself last said anything.
        state: The process's state as /proc has it: R, S, D, T (stopped), Z; "" if it cannot be seen.
        cpu_s: Processor time that it has used.
        queue: Batches that are ready; -1 if unknown.
    """

    of_rank: Width
    beat_age_s: Seconds = 0.0
    state: str = ""
    cpu_s: Seconds = 0.0
    queue: int = -1


class Collectives(_Event, frozen=True, kw_only=True, tag="coll", gc=False):
    """Durations of one kind of collective since the last such event.

    Attributes:
        op: Which kind.
        n: How many.
        hist: Bucket number of the base-2 exponential histogram (``histogram.SCALE``) to count.
        top: The longest ones, as (step, seconds).
    """

    op: str
    n: Count
    hist: dict[int, Count] = {}
    top: tuple[tuple[Count, Seconds], ...] = ()


class Fail(_Event, frozen=True, kw_only=True, tag="fail", gc=False):
    """Somebody noticed that a rank has failed.

    Attributes:
        kind: ``"exit"``, ``"stopped"``, ``"error"`` …
        of_rank: Which, -1 if unknown.
        first_seen_by: ``"daemon"``, ``"launcher"``, ``"rank 3"``; the daemon only observes, others act.
        died_wall_ns: When it happened, if that is known to be earlier than ``wall_ns``; 0 if not.
        evidence: Why somebody thinks so.
    """

    kind: str
    of_rank: Width = -1
    first_seen_by: str = ""
    died_wall_ns: WallNs = 0
    evidence: str = ""


class Membership(_Event, frozen=True, kw_only=True, tag="membership", gc=False):
    """So many devices are paid for from here on."""

    n_devices: Width


class Cache(_Event, frozen=True, kw_only=True, tag="cache", gc=False):
    """What the node's cache did since the start of the attempt."""

    hits: Count = 0
    misses: Count = 0
    bytes: dict[str, int] = {}
    evictions: Count = 0


Event = (
    RunStart
    | RunEnd
    | AttemptStart
    | AttemptEnd
    | PhaseBegin
    | PhaseEnd
    | Step
    | StepLate
    | CkptBegin
    | CkptStaged
    | CkptCommit
    | CkptFail
    | CkptDelete
    | Restore
    | Rollback
    | Heartbeat
    | Collectives
    | Fail
    | Membership
    | Cache
)


class _Head(msgspec.Struct, frozen=True):
    v: int
    ev: str


_events = msgspec.json.Decoder(Event)
_heads = msgspec.json.Decoder(_Head)
_KNOWN = frozenset(kind.__struct_config__.tag for kind in Event.__args__)


def decode(line: bytes, *, where: str) -> Event | None:
    """The event in one line; ``None`` if it is of a kind that this release does not know.

    Args:
        line: With or without its end.
        where: File and line, for errors.

    Raises:
        ConfigError: The line is of another format version.
        ValueError: It is no event.
    """
    try:
        event: Event = _events.decode(line)
    except msgspec.MsgspecError:
        head = _heads.decode(line)
        if head.v != FORMAT_VERSION:
            raise _other_version(head.v, where) from None
        if head.ev not in _KNOWN:
            return None
        raise
    if event.v != FORMAT_VERSION:
        raise _other_version(event.v, where)
    return event


def decode_block(lines: bytes) -> list[Event] | None:
    """The events of whole lines; ``None`` if ``decode`` has to look at each."""
    try:
        found: list[Event] = _events.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if all(event.v == FORMAT_VERSION for event in found) else None


def encode(event: Event) -> bytes:
    """The event's line."""
    return msgspec.json.encode(event) + b"\n"


def _other_version(version: int, where: str) -> ConfigError:
    return ConfigError(
        f"{where} has format version {version} and this cacheloader reads version {FORMAT_VERSION}; "
        "make the report with the release that wrote it"
    )
