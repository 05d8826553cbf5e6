"""The search for the newest checkpoint that verifies, in which all ranks take part and come to one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cacheloader.checkpoint import survey
from cacheloader.checkpoint.verify import finding, share_of
from cacheloader.errors import NoValidCheckpoint

if TYPE_CHECKING:
    from cacheloader.checkpoint.commit import Commit, Name
    from cacheloader.checkpoint.ranks import Ranks
    from cacheloader.checkpoint.store import Store

Verify = Literal["bytes", "sizes"]
StartOver = Literal["never", "if_never_committed", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A save that was passed over.

    Attributes:
        name: Its folder.
        reason: Why it cannot be resumed from.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a search found.

    Attributes:
        commit: The newest checkpoint that verifies; ``None`` if the job is to start at step 0.
        skipped: Newer saves, newest first, with reasons.
        bad: Those of them whose bytes are wrong though they were committed.
        unreadable: Those that could not be read, and may be whole.
    """

    commit: Commit | None
    skipped: tuple[Skipped, ...] = ()
    bad: frozenset[Name] = frozenset()
    unreadable: frozenset[Name] = frozenset()


def choose(store: Store, ranks: Ranks, *, verify: Verify, start_over: StartOver, max_step: int | None) -> Choice:
    """The checkpoint to resume from; the same on every rank.

    Rank 0 looks for a complete one, all ranks read its bytes, each its share, and take it or go on together.

    Args:
        store: Where checkpoints lie.
        ranks: Who decides.
        verify: Whether bytes are read, or only sizes compared.
        start_over: When to begin at step 0 though there are saves.
        max_step: Pass over checkpoints of later steps.

    Raises:
        NoValidCheckpoint: There are saves, or were, and none can be resumed from.
    """
    found = ranks.from_first(lambda: survey.names(store))
    if start_over == "always":
        return Choice(commit=None)
    if not found:
        if ranks.from_first(lambda: survey.was_ever_committed(store)):
            raise NoValidCheckpoint(
                f"{store} held a committed checkpoint once ({survey.ONCE_FILE} says so) and holds no save now; "
                f"starting at step 0 has to be asked for: look where they went, remove {survey.ONCE_FILE}, or pass "
                'start_over="always"'
            )
        return Choice(commit=None)
    skipped: list[Skipped] = []
    bad: set[Name] = set()
    unreadable: set[Name] = set()
    for name in found:
        if max_step is not None and name.step > max_step:
            skipped.append(Skipped(name=str(name), reason=f"step {name.step} is beyond max_step={max_step}"))
            continue
        one = ranks.from_first(lambda name=name: survey.look(store, name))  # type: ignore[misc]
        if one.commit is None:
            skipped.append(Skipped(name=str(name), reason=one.reason))
            continue
        if verify == "bytes":
            share = share_of(one.commit, rank=ranks.rank, world_size=ranks.world_size)
            findings = [it for it in ranks.gather(finding(store, one.commit, share)) if it[1]]
            if findings:
                is_bad, reason = max(findings, key=lambda it: it[0])  # one wrong byte settles it
                skipped.append(Skipped(name=str(name), reason=reason))
                (bad if is_bad else unreadable).add(name)
                continue
        return Choice(commit=one.commit, skipped=tuple(skipped), bad=frozenset(bad), unreadable=frozenset(unreadable))
    if start_over == "if_never_committed" and not ranks.from_first(lambda: survey.was_ever_committed(store)):
        return Choice(commit=None, skipped=tuple(skipped))
    listed = "; ".join(str(one) for one in skipped[:10]) + ("; …" if len(skipped) > 10 else "")
    raise NoValidCheckpoint(
        f"there are {len(found)} saves in {store} and none can be resumed from ({listed}); starting at step 0 would "
        "throw their training away, so it has to be asked for: repair or remove them (cacheloader ckpt rm), or pass "
        'start_over="always", or "if_never_committed" where it may be that no save was ever completed'
    )
