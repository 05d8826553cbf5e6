"""Starts the ranks of one attempt and ends them all when one ends: ``python -m tests.chaos.launcher CONFIG.json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.parent_death import die_with_parent


def main(path: str) -> int:
    config = json.loads(Path(path).read_text())
    world = config["world"]
    environment = {**os.environ, "WORLD_SIZE": str(world)}
    command = die_with_parent([sys.executable, "-m", "tests.chaos.trainer", path])
    ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(world)]
    folder = Path(config["folder"])
    (folder / f"pids-{config['attempt']:04d}.json").write_text(json.dumps([rank.pid for rank in ranks]))
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        if any(code not in (None, 0) for code in codes):
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait(60)
            print(f"a rank ended with one of {codes}", file=sys.stderr)
            return 1
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
