"""The position of a job in its data: small, versioned, plain types, the same on every rank.

It counts rows of the order *delivered to the training loop*, so what workers have read ahead never enters. World size,
worker count and batch size are not part of it and may change; everything that would change which sample comes next
is, and is checked field by field when a state is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from cacheloader.errors import StateMismatch
from cacheloader.order.options import ORDER_VERSION

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cacheloader.order.options import OrderOptions

FORMAT_VERSION = 1

Policy = Literal["accept", "restart_epoch"]
_POLICIES = ("accept", "restart_epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a job stands.

    Attributes:
        manifest: Digest of the data set's manifest.
        order: Everything else that decides which sample comes next: ``OrderOptions`` and the shards' ``layout``.
        epoch: Epoch, from 0.
        row: Rows of that epoch that have been delivered.
    """

    manifest: str
    order: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    epoch: int = 0
    row: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A fresh dictionary of plain types, safe for JSON and for ``torch.load(weights_only=True)``."""
        return {
            "version": FORMAT_VERSION,
            "manifest": self.manifest,
            "order": dict(self.order),
            "epoch": self.epoch,
            "row": self.row,
        }


def order_fields(options: OrderOptions) -> dict[str, int | float | str | bool]:
    """What a position must repeat: ``options`` and the version of the rules that turn them into an order."""
    return {**asdict(options), "order_version": ORDER_VERSION}


def layout(samples_per_shard: NDArray[np.int64]) -> str:
    """What the order takes from the shards: how many samples each holds. Wherever they lie, it is the same order.

    Args:
        samples_per_shard: int64 [shards].

    Returns:
        Short text that differs whenever the counts do, such as ``"16 shards, 1024 samples, 0f5e…"``.
    """
    counts = samples_per_shard.astype("<i8")
    digest = hashlib.blake2b(counts.tobytes(), digest_size=8).hexdigest()
    return f"{len(counts)} shards, {int(counts.sum())} samples, {digest}"


def parse(state: Mapping[str, Any]) -> Position:
    """A position from a saved dictionary.

    Raises:
        StateMismatch: It is no position, or one of a newer cacheloader.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"a saved position is a dictionary and this is {state!r:.100}; pass what state_dict() gave")
    version = state.get("version")
    if version != FORMAT_VERSION:
        raise StateMismatch(
            f"the saved position has format version {version!r} and this cacheloader reads version {FORMAT_VERSION}; "
            "load it with the release that wrote it"
        )
    wanted = {"version", *(f.name for f in fields(Position))}
    if set(state) != wanted:
        raise StateMismatch(
            f"the saved position has the fields {sorted(state)} and should have {sorted(wanted)}; "
            "pass what state_dict() returned, unchanged"
        )
    manifest, order, epoch, row = state["manifest"], state["order"], state["epoch"], state["row"]
    if not (isinstance(manifest, str) and isinstance(order, dict) and _is_count(epoch) and _is_count(row)):
        raise StateMismatch(
            f"the saved position has manifest={manifest!r}, order={order!r}, epoch={epoch!r}, row={row!r}; "
            "it needs text, a dictionary and two counts: pass what state_dict() returned, unchanged"
        )
    return Position(manifest=manifest, order=dict(order), epoch=epoch, row=row)


def reconcile(saved: Position, current: Position, *, on_mismatch: Mapping[str, Policy] | None = None) -> Position:
    """Where to go on, given a saved position and what the job reads now.

    Args:
        saved: What was stored.
        current: Manifest and order of this job; its epoch and row are not looked at.
        on_mismatch: For a field that differs, ``"accept"`` to go on at the saved row all the same, or
            ``"restart_epoch"`` to go on at row 0 of the saved epoch. Fields are ``manifest`` and those of the order.

    Returns:
        This job's manifest and order with the epoch and row to go on from.

    Raises:
        StateMismatch: A field differs and no policy was given for it; the text lists old and new.
    """
    policies = dict(on_mismatch or {})
    known = {"manifest", *current.order, *saved.order}
    for name, policy in policies.items():
        if name not in known or policy not in _POLICIES:
            raise StateMismatch(
                f"on_mismatch={{{name!r}: {policy!r}}} is unknown; fields are {sorted(known)}, policies {_POLICIES}"
            )
    old = {"manifest": saved.manifest, **saved.order}
    new = {"manifest": current.manifest, **current.order}
    different = [name for name in sorted(known) if old.get(name) != new.get(name)]
    refused = [name for name in different if name not in policies]
    if refused:
        diff = "; ".join(f"{name}: saved {old.get(name)!r}, now {new.get(name)!r}" for name in refused)
        raise StateMismatch(
            f"the saved position belongs to another order of samples ({diff}); restore what was, or pass "
            f"on_mismatch={dict.fromkeys(refused, 'accept')} to go on at the same row of the new order, or "
            "'restart_epoch' to redo the epoch in it"
        )
    restart = any(policies[name] == "restart_epoch" for name in different)
    row = 0 if restart else saved.row
    return Position(manifest=current.manifest, order=current.order, epoch=saved.epoch, row=row)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
