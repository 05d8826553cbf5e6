"""``cacheloader ckpt``: what lies in a checkpoint folder, whether it is whole, and what may go."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheloader.checkpoint import foreign, survey
from cacheloader.checkpoint.commit import parse_name
from cacheloader.checkpoint.failure import innermost
from cacheloader.checkpoint.retention import Retention, removable
from cacheloader.checkpoint.store import open_store
from cacheloader.checkpoint.verify import finding
from cacheloader.config import parse_storage_options
from cacheloader.errors import CheckpointError, ConfigError
from cacheloader.quantity import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from cacheloader.checkpoint.commit import Name
    from cacheloader.checkpoint.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint as it is shown.

    Attributes:
        name: Its folder or file.
        kind: Who wrote it.
        step: Training step, -1 if unknown.
        world_size: Ranks that wrote it, 0 if unknown.
        size_bytes: Of its files.
        saved_at: When, as its record says.
        proof: What was compared: ``checksums`` or ``sizes``; ``none`` where it failed before.
        reason: Why it cannot be resumed from; empty if nothing speaks against it.
    """

    name: str
    kind: str
    step: int
    world_size: int = 0
    size_bytes: int = 0
    saved_at: str = ""
    proof: str = "none"
    reason: str = ""


def add_parser(commands: Any, *, common: argparse.ArgumentParser) -> None:
    """Add ``ckpt`` and its three verbs to the command line."""
    parser = commands.add_parser("ckpt", help="list, verify and remove checkpoints")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    listing = verbs.add_parser("ls", parents=[common], help="what lies in a folder, newest first")
    listing.add_argument("url", help="the folder of a job's checkpoints: a path, or a URL that fsspec knows")
    listing.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    listing.set_defaults(run=_ls)

    verify = verbs.add_parser("verify", parents=[common], help="read checkpoints and compare checksums")
    verify.add_argument("url", help="as for ls")
    verify.add_argument("names", nargs="*", metavar="NAME", help="which; all by default")
    verify.set_defaults(run=_verify)

    rm = verbs.add_parser("rm", parents=[common], help="remove checkpoints; never the last that can be resumed from")
    rm.add_argument("url", help="as for ls")
    rm.add_argument("names", nargs="*", metavar="NAME", help="which")
    rm.add_argument("--keep-last", type=int, help="or: all but the newest N")
    rm.add_argument("--keep-every", type=int, help="beside those, keep each whose step is a multiple of N")
    rm.add_argument("--dry-run", action="store_true", help="only say what would go")
    rm.add_argument("--even-the-last", action="store_true", help="also the last that can be resumed from")
    rm.set_defaults(run=_rm)
    for verb in (listing, verify, rm):
        verb.add_argument("--storage-options", help="options of the store as a JSON object, named as fsspec names them")


def rows(store: Store, *, read_bytes: bool, only: Sequence[str] = ()) -> list[Row]:
    """Every checkpoint in a store, newest first, ours before those of others.

    Args:
        store: Where they lie.
        read_bytes: Read everything and compare checksums.
        only: Names of those to look at; all if empty.

    Raises:
        CheckpointError: One of ``only`` is not there, or is no checkpoint.
    """
    top = store.top()
    missing = [name for name in only if name not in top]
    if missing:
        raise CheckpointError(f"{store} has no {missing[0]}; cacheloader ckpt ls shows what it has")
    chosen = only or list(top)
    ours = sorted((name for text in chosen if (name := parse_name(text))), reverse=True)
    found = [_our_row(store, name, read_bytes=read_bytes) for name in ours]
    others = []
    for text in chosen:
        if parse_name(text) is None:
            one = foreign.examine(store, text, read_bytes=read_bytes)
            if one is not None:
                others.append(Row(**asdict(one)))
            elif only:
                raise CheckpointError(f"{store}/{text} is no checkpoint of a kind that is known here")
    return found + sorted(others, key=lambda row: (-row.step, row.name))


def _our_row(store: Store, name: Name, *, read_bytes: bool) -> Row:
    look = survey.look(store, name)
    if look.commit is None:
        size_bytes = sum(file.size_bytes for file in store.files(str(name)).values())
        return Row(name=str(name), kind="cacheloader", step=name.step, size_bytes=size_bytes, reason=look.reason)
    commit = look.commit
    return Row(
        name=str(name),
        kind="cacheloader",
        step=commit.step,
        world_size=commit.world_size,
        size_bytes=commit.size_bytes,
        saved_at=commit.saved_at,
        proof="checksums" if read_bytes else "sizes",
        reason=finding(store, commit, sorted(commit.files))[1] if read_bytes else "",
    )


def _ls(options: argparse.Namespace) -> int:
    return _show(options, rows(_store(options), read_bytes=options.verify))


def _verify(options: argparse.Namespace) -> int:
    store = _store(options)
    found = rows(store, read_bytes=True, only=options.names)
    if not found:
        raise CheckpointError(f"{store} holds no checkpoint, or is not there, so nothing was verified; check the URL")
    return _show(options, found)


def _show(options: argparse.Namespace, found: list[Row]) -> int:
    if options.json:
        print(json.dumps([asdict(row) for row in found]))
    elif not found:
        print(f"no checkpoints in {options.url}")
    else:
        head = ("name", "kind", "step", "ranks", "size", "state")
        table = [
            (
                row.name,
                row.kind,
                str(row.step) if row.step >= 0 else "",
                str(row.world_size or ""),
                format_size(row.size_bytes),
                f"NOT VALID: {row.reason}" if row.reason else f"whole, by {row.proof}",
            )
            for row in found
        ]
        widths = [max(len(row[i]) for row in (head, *table)) for i in range(5)]
        for row in (head, *table):
            print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]))
    return 1 if any(row.reason for row in found) else 0


def _rm(options: argparse.Namespace) -> int:
    store = _store(options)
    thinning = options.keep_last is not None or options.keep_every is not None
    if thinning == bool(options.names):
        raise ConfigError("name the checkpoints to remove, or pass --keep-last or --keep-every")
    if thinning:
        going = _superfluous(store, Retention(keep_last=options.keep_last, keep_every=options.keep_every))
    else:
        going = list(dict.fromkeys(options.names))
        rows(store, read_bytes=False, only=going)  # refuses what is not there, and what is no checkpoint
        if not options.even_the_last:
            _refuse_the_last(store, rows(store, read_bytes=False), going)
    if not options.dry_run:
        for text in going:
            name = parse_name(text)
            if name is None:
                store.remove(text)
            else:
                survey.remove(store, name)
        if going and not survey.names(store):
            store.remove(survey.ONCE_FILE)  # it was asked for, so the job may begin at step 0
    if options.json:
        print(json.dumps({"removed": going, "dry_run": options.dry_run}))
    else:
        for text in going:
            print(f"{'would remove' if options.dry_run else 'removed'} {text}")
    return 0


def _superfluous(store: Store, retention: Retention) -> list[str]:
    """What the retention does not keep; the newest one that stays was read to the end."""
    looked = [survey.look(store, name) for name in survey.names(store)]
    bad: set[Name] = set()
    unreadable: set[Name] = set()
    for found in looked:
        if found.commit is not None:
            is_bad, reason = finding(store, found.commit, sorted(found.commit.files))
            if not reason:
                break
            (bad if is_bad else unreadable).add(found.name)
    committed = [found.name for found in looked if found.commit]
    uncommitted = [found.name for found in looked if not found.commit]
    going = removable(committed, uncommitted, bad=bad, spared=unreadable, retention=retention)
    return [str(name) for name in going]


def _refuse_the_last(store: Store, looked: Sequence[Row], going: Sequence[str]) -> None:
    """Of each kind of which one goes that can be resumed from, one that was read to the end has to stay.

    Raises:
        CheckpointError: None does.
    """
    for row in looked:
        if row.name not in going or row.reason:
            continue
        staying = [it.name for it in looked if it.kind == row.kind and it.name not in going and not it.reason]
        if all(rows(store, read_bytes=True, only=[name])[0].reason for name in staying):
            raise CheckpointError(
                f"{row.name} is the last checkpoint in {store} that can be resumed from; pass --even-the-last to "
                "remove it all the same"
            )


def _store(options: argparse.Namespace) -> Store:
    store = open_store(options.url, parse_storage_options(options.storage_options))
    try:
        store.top()
    except Exception as error:  # each file system has its own
        raise CheckpointError(
            f"{store} cannot be listed ({innermost(error)}); check the URL, and the credentials in --storage-options, "
            "in the environment or in the profile"
        ) from error
    return store
