"""The command ``cacheloader``. Exit status: 0 fine, 1 a finding or a failure, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import cacheloader
from cacheloader.audit.folder import audit_folder
from cacheloader.audit.report import lines
from cacheloader.checkpoint.cli import add_parser as add_ckpt
from cacheloader.config import EMBEDDED, NO_DAEMON, TransportOptions, parse_storage_options
from cacheloader.errors import CacheloaderError, ConfigError
from cacheloader.goodput import command as goodput_command
from cacheloader.manifest.sidecar import sidecar_text, write_sidecar
from cacheloader.planning import command as plan_command
from cacheloader.protocol.messages import DatasetSpec
from cacheloader.quantity import format_size
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.control import read_status, stop_daemon
from cacheloader.transport.open import open_transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheloader.manifest.record import Manifest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except ConfigError as error:
        print(f"cacheloader: {error}", file=sys.stderr)
        return 2
    except CacheloaderError as error:
        print(f"cacheloader: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the end
        return 141
    return status


def _demo(options: argparse.Namespace) -> int:
    try:
        from cacheloader.demo import story
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'the demo needs the package that provides {error.name!r}; install it with: pip install "cacheloader[demo]"'
        ) from error
    say = (lambda _text: None) if options.json else print
    results = story.run(num_jpegs=options.jpegs, keep=options.keep, say=say)
    if options.json:
        print(json.dumps(results))
    return 0


def _index(options: argparse.Namespace) -> int:
    transport = open_transport(_transport_options(options))
    try:
        with _Bar() as bar:
            manifest = transport.open_dataset(_spec(options), progress=bar.show)
    finally:
        transport.close()
    directory = options.directory or _directory_of(manifest.uri(0))
    if options.output:
        try:
            write_sidecar(manifest, options.output, directory=directory)
        except OSError as error:
            raise ConfigError(f"--output={options.output} cannot be written ({error.strerror}); name a file") from error
    if options.json:
        print(json.dumps(_described(manifest)))
    elif options.output:
        print(
            f"{manifest.total_samples:,} samples in {len(manifest):,} shards ({format_size(manifest.total_bytes)}); "
            f"wrote {options.output}: store it beside the shards and no job has to count them again"
        )
    else:
        print(sidecar_text(manifest, directory=directory))
    return 0


def _warm(options: argparse.Namespace) -> int:
    import numpy as np

    transport_options = _transport_options(options)
    if transport_options.daemon == NO_DAEMON:
        raise ConfigError('--daemon none has no cache to warm; leave it out, or name a daemon by "unix:///path"')
    transport = open_transport(transport_options)
    try:
        with _Bar() as bar:
            manifest = transport.open_dataset(_spec(options), progress=bar.show)
        shards = np.arange(len(manifest), dtype=np.int32)
        clock = shards.astype(np.int64)
        transport.follow(AccessPlan(first_clock=clock, stop_clock=clock + 1, shard=shards, clock=0))
        sources: dict[str, int] = {}
        with tqdm(
            total=manifest.total_bytes, unit="B", unit_scale=True, desc="warming", leave=False, disable=None
        ) as progress:
            for shard in shards:
                lease = transport.acquire(int(shard))
                sources[lease.source] = sources.get(lease.source, 0) + 1
                lease.release()
                transport.advance(int(shard) + 1)
                progress.update(int(manifest.size_bytes[shard]))
    finally:
        transport.close()
    if options.json:
        print(json.dumps(_described(manifest) | {"shards_by_source": sources}))
    else:
        already = sources.get("nvme", 0)
        print(
            f"{len(manifest):,} shards, {format_size(manifest.total_bytes)}: {already:,} were there before they were "
            f"asked for, {sources.get('origin', 0):,} had to be waited for, {sources.get('memory', 0):,} did not fit"
        )
    return 1 if sources.get("memory") else 0


def _status(options: argparse.Namespace) -> int:
    transport_options = _transport_options(options)
    if options.stop:
        if transport_options.daemon != EMBEDDED:
            raise ConfigError("--stop is for a private daemon; stop a shared one through its service manager")
        stopped = stop_daemon(transport_options.directory)
        print("stopped" if stopped else f"no daemon runs in {transport_options.directory}")
        return 0
    status = read_status(transport_options)
    if options.json:
        print(json.dumps(status))
        return 0
    plan, account = status["plan"], status["account"]
    used = plan["resident_bytes"] + plan["reserved_bytes"] + plan["unlinked_bytes"] + plan["overhead_bytes"]
    asked = plan["hits"] + plan["misses"]
    for name, value in (
        ("daemon", f"pid {status['pid']}, {'private' if status['private'] else 'shared'}, {status['cache_dir']}"),
        ("uptime", f"{status['uptime_s']:.0f} s, {status['cpu_s']:.1f} s of CPU"),
        ("cache", f"{format_size(used)} of {format_size(plan['quota_bytes'])}, {plan['resident_shards']} shards"),
        ("sessions", f"{plan['sessions']}, {plan['leased_shards']} shards leased, {plan['waiting_requests']} waiting"),
        ("hits", f"{plan['hits']} of {asked}" + (f" ({plan['hits'] / asked:.1%})" if asked else "")),
        ("origin", f"{format_size(sum(account['remote_read_bytes'].values()))} read"),
        ("evictions", str(plan["evictions"])),
        ("missed", f"{account['fallbacks']} times by sessions, for {account['away_seconds']:.0f} s in all"),
        ("degraded", ", ".join(status["degraded"]) or "no"),
        *(("", f"{one['failures']} requests failed: {one['message']}") for one in status["origin_troubles"]),
        *(
            ("", f"{one['directory']} is {one['condition']}: {one['cause']}")
            for one in status["directories"]
            if one["condition"] != "well"
        ),
    ):
        print(f"{name:<10}{value}")
    return 1 if status["degraded"] else 0


def _audit(options: argparse.Namespace) -> int:
    answer = audit_folder(options.folder)
    if options.json:
        totals = {"num_repeats": answer.num_repeats, "num_gaps": answer.num_gaps}
        print(json.dumps(asdict(answer) | totals))
    else:
        print("\n".join(lines(answer)))
    return 1 if answer.findings else 0


class _Bar:
    """A progress bar for the resolution of a data set, shown once there is something to show."""

    def __enter__(self) -> _Bar:
        self._bar: tqdm[Any] = tqdm(leave=False, unit=" shards", delay=0.5, disable=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, stage: str, done: int, total: int) -> None:
        self._bar.set_description(stage, refresh=False)
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)


def _opened(options: argparse.Namespace) -> Manifest:
    # The size that is planned for is none that the daemon should have.
    transport = open_transport(TransportOptions(daemon=options.daemon, cache_dir=options.cache_dir))
    try:
        with _Bar() as bar:
            return transport.open_dataset(_spec(options), progress=bar.show)
    finally:
        transport.close()


def _spec(options: argparse.Namespace) -> DatasetSpec:
    storage_options = parse_storage_options(options.storage_options)
    return DatasetSpec(urls=options.urls, format=options.format, storage_options=storage_options)


def _transport_options(options: argparse.Namespace) -> TransportOptions:
    return TransportOptions(daemon=options.daemon, cache_dir=options.cache_dir, cache_size=options.cache_size)


def _described(manifest: Any) -> dict[str, Any]:
    return {
        "digest": manifest.digest,
        "num_shards": len(manifest),
        "num_samples": manifest.total_samples,
        "size_bytes": manifest.total_bytes,
    }


def _directory_of(uri: str) -> str:
    return uri.rpartition("/")[0] + "/"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cacheloader", description=cacheloader.__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=cacheloader.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--daemon", help="unix:///path of a shared daemon; by default a private one")
    where.add_argument("--cache-dir", type=Path, help="where the private daemon keeps its cache")
    where.add_argument("--cache-size", help='what it may hold, such as "200GiB"')
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("urls", nargs="+", metavar="URL", help="shards: a URL, brace pattern, glob or directory")
    data.add_argument("--format", default="", help="shard format, where the file name does not tell")
    data.add_argument("--storage-options", help="options of the store as a JSON object, named as fsspec names them")

    demo = commands.add_parser("demo", parents=[common], help="train from a local S3 server, kill, resume")
    demo.add_argument("--jpegs", type=int, default=2400, help="size of the synthetic data set (default 2400)")
    demo.add_argument("--keep", action="store_true", help="keep the demo's folder")
    demo.set_defaults(run=_demo)

    index = commands.add_parser("index", parents=[common, where, data], help="count samples and write shards.json")
    index.add_argument("--output", type=Path, help="write here instead of printing")
    index.add_argument("--directory", help="the URL of the directory that shards.json will lie in")
    index.set_defaults(run=_index)

    warm = commands.add_parser("warm", parents=[common, where, data], help="bring a data set into the node's cache")
    warm.set_defaults(run=_warm)

    audit = commands.add_parser("audit", parents=[common], help="was each sample delivered once, over all restarts?")
    audit.add_argument("folder", type=Path, help="what the loader had as record_to; files of several nodes together")
    audit.set_defaults(run=_audit)

    goodput_command.add_parser(commands, common)

    add_ckpt(commands, common=common)

    plan_command.add_parser(commands, parents=[common, where], opened=_opened)

    status = commands.add_parser("status", parents=[common, where], help="show, or stop, the running daemon")
    status.add_argument("--stop", action="store_true", help="ask a private daemon to leave")
    status.set_defaults(run=_status)
    return parser
