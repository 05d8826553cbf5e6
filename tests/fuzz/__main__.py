"""The long form: ``python -m tests.fuzz --frames 1000000 --seed 1``. The seed makes the same frames again."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from tests.fuzz.attack import Attack, Report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)

    def told(report: Report) -> None:
        print(
            f"{report.frames} frames, {report.offenders} offenders, {report.rss_bytes[-1] >> 20} MiB", file=sys.stderr
        )

    with tempfile.TemporaryDirectory(prefix="cacheloader-fuzz-") as folder:
        report = Attack(Path(folder), seed=seed).run(options.frames, told=told)
    print(json.dumps(report.as_record(), indent=1))


if __name__ == "__main__":
    main()
