"""The long form: ``python -m tests.soak --gigabytes 20 --seed 1``."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from tests.soak.passage import Report, pass_through


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where shards and cache lie; default: a temporary one"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)

    def told(report: Report) -> None:
        print(f"{report.fetched_bytes >> 20} MiB fetched, {report.rss_bytes[-1] >> 20} MiB resident", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="cacheloader-soak-", dir=options.folder) as folder:
        report = pass_through(Path(folder), total_bytes=int(options.gigabytes * 1e9), seed=seed, told=told)
    print(json.dumps(report.as_record(), indent=1))


if __name__ == "__main__":
    main()
