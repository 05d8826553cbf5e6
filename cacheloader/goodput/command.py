"""``cacheloader goodput``: where did the paid time go, and what should I do first?"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheloader.errors import ConfigError
from cacheloader.goodput import textfile
from cacheloader.goodput.events import RunEnd
from cacheloader.goodput.folder import EventFolder
from cacheloader.goodput.ledger import Ledger
from cacheloader.goodput.page import page
from cacheloader.goodput.report import report
from cacheloader.goodput.screen import lines

if TYPE_CHECKING:
    import argparse

    from cacheloader.goodput.account import Account

LIVE_S = 120.0
"""A run without an end whose last event is younger than this counts as under way."""

WATCH_S = 5.0


class Reader:
    """A run's folder and its ledger; asking again reads only what is new."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = EventFolder(folder)
        self._ledger = Ledger()
        self._newest_ns = 0
        self._ended_ns = 0

    def account(self) -> tuple[Account, bool]:
        """The account as of now, and whether the run is under way.

        Raises:
            ConfigError: There are several runs below the folder, in folders of their own.
        """
        for found in self.folder.blocks():
            self._ledger.add(found)
            self._newest_ns = max(self._newest_ns, *(event.wall_ns for event in found), 0)
            self._ended_ns = max(self._ended_ns, *(event.wall_ns for event in found if isinstance(event, RunEnd)), 0)
        self._refuse_several_runs()
        now_ns = time.time_ns()
        is_live = self._ended_ns < self._newest_ns - 10**9 and now_ns - self._newest_ns < LIVE_S * 1e9
        return self._ledger.account(now_ns=now_ns if is_live else None), is_live

    def _refuse_several_runs(self) -> None:
        """A run's files may lie in a folder for each node, have copies, or two names since it was renamed."""
        names, begun = (
            {name for found in places.values() for name in found} for places in (self.folder.runs, self.folder.begun)
        )
        if len(self.folder.runs) > 1 and (len(names) > 1 or (len(self.folder.begun) > 1 and len(begun) > 1)):
            listed = ", ".join(sorted(self.folder.runs)[:10]) + (", …" if len(self.folder.runs) > 10 else "")
            raise ConfigError(
                f"{self.folder.path} holds several runs, and an account is of one; name one of the folders {listed}, "
                "or put the files of one run into one folder"
            )

    def report(self) -> dict[str, Any]:
        """The report as of now."""
        account, is_live = self.account()
        return report(account, name=self.folder.name, damaged=self.folder.damaged, is_live=is_live)


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser of ``cacheloader``."""
    parser = commands.add_parser("goodput", parents=[common], help="where did a run's paid time go?")
    parser.add_argument("folder", help="the folder that cl.goodput.Run was given, or a URL of a copy (fsspec)")
    parser.add_argument("--html", type=Path, help="write a page with charts here, too")
    parser.add_argument("--textfile", type=Path, help="write metrics for Prometheus' textfile collector here, too")
    parser.add_argument("--watch", action="store_true", help=f"show it again every {WATCH_S:.0f} s")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status: 1 where lines could not be read."""
    reader = Reader(options.folder)
    while True:
        begin_s = time.monotonic()
        _show(reader, options)
        if not options.watch:
            return 1 if reader.folder.damaged else 0
        time.sleep(max(WATCH_S, 10 * (time.monotonic() - begin_s)))  # a long run's report costs seconds itself


def _show(reader: Reader, options: argparse.Namespace) -> None:
    """One report; nothing of it stays in memory until the next."""
    account, is_live = reader.account()
    found = report(account, name=reader.folder.name, damaged=reader.folder.damaged, is_live=is_live)
    if options.html:
        _write(options.html, page(account, found), "--html")
    if options.textfile:
        _write(options.textfile, textfile.text(found), "--textfile")
    if options.json:
        print(json.dumps(found))
    else:
        if options.watch and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        print("\n".join(lines(found)), flush=True)


def _write(path: Path, content: str, option: str) -> None:
    half = path.with_name(f".{path.name}.half")
    try:
        half.write_text(content)
        half.replace(path)
    except OSError as error:
        raise ConfigError(f"{option}={path} cannot be written ({error.strerror}); name a file") from error
