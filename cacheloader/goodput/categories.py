"""What can become of a paid device-second. Each has one category; together they are all that was paid for."""

from __future__ import annotations

from enum import IntEnum


class Category(IntEnum):
    """In the order in which reports show them."""

    COMPUTE = 0
    """Computing of steps that were kept: at or below the last checkpoint that was seen to be durable."""
    PROVISIONAL = 1
    """Computing of steps behind it: kept with the next commit, lost with the next failure."""
    FETCH = 2
    """The loop waited for a batch and the device had nothing to do."""
    CKPT = 3
    """The training thread stood still for a save."""
    STRAGGLER = 4
    """Waiting inside a collective for the last rank to arrive."""
    HANG = 5
    """A step that took many times as long as its neighbours, beyond what those took; on all ranks that waited."""
    LOST = 6
    """Steps that a failure or a rollback undid, and the step that was under way."""
    DETECT = 7
    """From the moment a rank died, or last moved, to the moment when something reacted."""
    SPIN = 8
    """From there until the last process of the attempt was gone."""
    RESTART = 9
    """Launching again, start-up, finding and reading the checkpoint, after a failure."""
    INIT = 10
    """The same at the first start."""
    GAP = 11
    """Between two jobs of the run, and devices that are paid for and have no rank."""
    EVAL = 12
    """Evaluation."""
    OTHER = 13
    """What nothing above explains: code between steps, other phases, the end of a process."""

    @property
    def label(self) -> str:
        """Its name in JSON and in metrics."""
        return _LABELS[self]


_LABELS = {
    Category.COMPUTE: "kept_compute",
    Category.PROVISIONAL: "provisional",
    Category.FETCH: "exposed_fetch",
    Category.CKPT: "checkpoint",
    Category.STRAGGLER: "straggler_wait",
    Category.HANG: "hang",
    Category.LOST: "lost_work",
    Category.DETECT: "detection",
    Category.SPIN: "spin_wait",
    Category.RESTART: "restart",
    Category.INIT: "init",
    Category.GAP: "gap",
    Category.EVAL: "eval",
    Category.OTHER: "other",
}


class Part(IntEnum):
    """A piece of a step, before it is known whether the step was kept."""

    COMPUTE = 0
    FETCH = 1
    WAIT = 2
    HANG = 3
    WARMUP = 4


class Fate(IntEnum):
    """What became of a step."""

    KEPT = 0
    PROVISIONAL = 1
    LOST = 2
