"""``python -m tests.chaos --events 300``: breaks a job at random and counts what it got wrong."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import ChaosRun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--events", type=int, default=300, help="kills and faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, help="kept at the end; by default a temporary one")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.events} events", flush=True)

    def say(line: str) -> None:
        if not options.quiet:
            print(line, flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        where = options.folder or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        run = ChaosRun(where, num_events=options.events, seed=options.seed, say=say)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: run.end_early())
        summary = run.run()
    print("\n".join(summary.lines()))
    print("clean" if summary.is_clean else "NOT CLEAN")
    return 0 if summary.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
