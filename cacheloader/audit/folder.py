"""The audit of a folder of step records."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING

from cacheloader.audit.coverage import Subject, epoch_audit
from cacheloader.audit.history import At, History, KeptStep, fold
from cacheloader.audit.report import Audit, EpochAudit, Finding
from cacheloader.errors import ConfigError
from cacheloader.manifest.record import Manifest
from cacheloader.order.options import ORDER_VERSION, OrderOptions
from cacheloader.order.sample_order import SampleOrder
from cacheloader.steps import Begin, Recorded, manifest_path, read_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_LAG_STEPS = 64
"""Ranks may have been this many steps apart when a job was killed; more means that a file is missing or cut."""


def audit_folder(folder: Path) -> Audit:
    """Read the records in ``folder`` and check them.

    Raises:
        ConfigError: There are none, or they cannot be checked by this release.
    """
    return audit(read_folder(folder), lambda digest: _manifest(folder, digest))


def audit(recorded: Recorded, manifest: Callable[[str], Manifest]) -> Audit:
    """Check records.

    Args:
        recorded: All records of one loader.
        manifest: Gives the manifest of a digest.

    Raises:
        ConfigError: No iteration has begun, or the order is one of another release.
    """
    if not any(isinstance(record, Begin) for record in recorded.records):
        raise ConfigError("the step records hold no whole line yet; audit them once the loader has begun to iterate")
    history = fold(recorded.records)
    subjects = _Subjects(manifest)
    findings = [Finding(kind="file", text=text) for text in recorded.damaged] + history.findings
    steps, in_flight = _parted(history, subjects)
    findings += _stragglers(in_flight)
    by_epoch: dict[int, list[KeptStep]] = defaultdict(list)
    for step in steps:
        by_epoch[step.at.epoch].append(step)
    last_begin = history.last_begin
    last_epoch = max([last_begin.epoch, *by_epoch])
    epochs: list[EpochAudit] = []
    for epoch in range(history.first.epoch, last_epoch + 1):
        here = by_epoch[epoch]
        begins = list({_order_name(step.begin): step.begin for step in here}.values()) or [last_begin]
        if len(begins) > 1:
            text = (
                f"epoch {epoch} was read in {len(begins)} orders (changed while it was under way): it is no one epoch"
            )
            findings.append(Finding(kind="order", text=text, epoch=epoch))
            continue
        behind = [step.global_batch for step in steps if step.at.epoch > epoch][:1] or [last_begin.global_batch]
        checked, found = epoch_audit(
            here,
            subjects.of(begins[0]),
            epoch=epoch,
            start_row=history.first.row if epoch == history.first.epoch else 0,
            due_row=last_begin.row if epoch == last_begin.epoch else None,
            is_last=epoch == last_epoch,
            next_global_batch=behind[0],
        )
        epochs.append(checked)
        findings += found
    return Audit(
        world_sizes=history.world_sizes,
        num_rolled_back=history.num_rolled_back,
        num_in_flight=len(in_flight),
        has_keys=bool(steps) and all(part.keys is not None for step in steps for part in step.parts),
        epochs=epochs,
        findings=findings,
    )


class _Subjects:
    """Data sets and orders by what an iteration said of them when it began."""

    def __init__(self, manifest: Callable[[str], Manifest]) -> None:
        self._manifest = manifest
        self._known: dict[str, Subject] = {}

    def of(self, begin: Begin) -> Subject:
        name = _order_name(begin)
        if name not in self._known:
            manifest = self._manifest(begin.manifest)
            order = SampleOrder(manifest.num_samples, _options(begin))
            self._known[name] = Subject(manifest=manifest, order=order)
        return self._known[name]


def _parted(history: History, subjects: _Subjects) -> tuple[list[KeptStep], list[KeptStep]]:
    """Steps that must be whole, and those at the very end that the job's death may have cut through."""
    resumed_at = At(history.last_begin.epoch, history.last_begin.row)
    last_whole = max(
        (i for i, step in enumerate(history.steps) if not subjects.of(step.begin).absent_ranks(step)), default=-1
    )
    stop = next(
        (i for i, step in enumerate(history.steps) if i > last_whole and step.at >= resumed_at), len(history.steps)
    )
    return history.steps[:stop], history.steps[stop:]


def _stragglers(in_flight: list[KeptStep]) -> list[Finding]:
    if not in_flight:
        return []
    ranks = range(in_flight[0].world_size)
    missing = {rank: sum(rank not in {part.rank for part in step.parts} for step in in_flight) for rank in ranks}
    return [
        Finding(
            kind="rank",
            text=f"rank {rank} recorded none of the last {count} steps from row {in_flight[0].at.row} of epoch "
            f"{in_flight[0].at.epoch} on: its file is missing or cut",
            epoch=in_flight[0].at.epoch,
        )
        for rank, count in missing.items()
        if count > MAX_LAG_STEPS
    ]


def _order_name(begin: Begin) -> str:
    return f"{begin.manifest} {sorted(begin.order.items())}"


def _options(begin: Begin) -> OrderOptions:
    version = begin.order.get("order_version")
    if version != ORDER_VERSION:
        raise ConfigError(
            f"the steps were taken in an order of version {version!r} and this cacheloader computes version "
            f"{ORDER_VERSION}; audit them with the release that recorded them"
        )
    names = [option.name for option in fields(OrderOptions)]
    absent = [name for name in names if name not in begin.order]
    if absent:
        raise ConfigError(f"the recorded order lacks {', '.join(absent)}; audit it with the release that recorded it")
    return OrderOptions(**{name: begin.order[name] for name in names})  # type: ignore[arg-type]


def _manifest(folder: Path, digest: str) -> Manifest:
    path = manifest_path(folder, digest)
    try:
        manifest = Manifest.from_buffer(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}) and names the samples; copy it to the records of the other ranks"
        ) from error
    if manifest.digest != digest:
        raise ConfigError(f"{path} holds another manifest ({manifest.digest}); put back the file that rank 0 wrote")
    return manifest
