"""The tests on a host that stops whom it likes: ``python -m tests.pauses -n 2 --dist=loadfile``.

Runs pytest with the given arguments and pauses its processes meanwhile, one at a time, whichever it is: the test's own,
a daemon, a worker, a store. A test that fails here, and has not stopped a process itself, takes a moment for a promise.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos.processes import carriers

MARK = "CACHELOADER_TEST_PAUSES"
_LONGEST_S = 2.5  # below what any part of the product gives another to answer in
_LOOK_S = 0.3


def pause(pid: int, pause_s: float) -> bool:
    """Stop a process for a while, unless it has ended or been stopped by somebody else."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "SRD":
            return False
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(pause_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pauses", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of whom to pause, when and how long; default: random")
    parser.add_argument("--pause-s", type=float, default=0.12, help="mean length of a pause")
    parser.add_argument("--rest-s", type=float, default=0.25, help="mean time between two pauses")
    options, arguments = parser.parse_known_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    mark = f"{os.getpid()}-{seed}"
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.pauses.threads", *arguments], env={**os.environ, MARK: mark}
    )
    num_pauses = 0
    processes: list[int] = []
    look_at_s = 0.0
    while tests.poll() is None:
        if time.monotonic() >= look_at_s:
            processes = [int(folder.name) for folder in carriers(MARK, mark)]
            look_at_s = time.monotonic() + _LOOK_S
        if processes:
            pause_s = min(_LONGEST_S, chance.expovariate(1 / options.pause_s))
            num_pauses += pause(chance.choice(processes), pause_s)
        time.sleep(chance.expovariate(1 / options.rest_s))
    print(f"{num_pauses} pauses, seed {seed}")
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
