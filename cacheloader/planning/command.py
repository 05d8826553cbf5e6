"""``cacheloader plan``: numbers of a job in, a forecast out, from the daemon's own planner in virtual time."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

from cacheloader.errors import ConfigError, DaemonError
from cacheloader.interpreter import command, search_path
from cacheloader.quantity import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from cacheloader.manifest.record import Manifest

SIMULATOR = "cacheloader_daemon.simulator"
MOST_SHARDS = 2000
"""Shards that are simulated at most: a larger data set and its cache are scaled down together, and the answer up."""

STEPS_PER_SHARD = 4
"""Steps in which a shard is read: finer ones cost time and change nothing that can be seen."""

TIMEOUT_S = 600.0
SOME_STALL = 0.01
"""From which part of the time on waiting is a finding."""

DEFAULT_SHUFFLE_WINDOW = 8


def add_parser(
    commands: Any, *, parents: Sequence[argparse.ArgumentParser], opened: Callable[[argparse.Namespace], Manifest]
) -> None:
    """Add the command to the parser of ``cacheloader``.

    Args:
        commands: Where commands are added.
        parents: Parsers of ``--json`` and of where the cache is.
        opened: The manifest of the URLs among the options.
    """
    parser = commands.add_parser(
        "plan", parents=parents, help="what will a cache of this size read from the store, and how long will it wait?"
    )
    parser.add_argument("urls", nargs="*", metavar="URL", help="shards, or give --shards, --shard-size and --samples")
    parser.add_argument("--format", default="", help="shard format, where the file name does not tell")
    parser.add_argument("--storage-options", help="options of the store as a JSON object, named as fsspec names them")
    parser.add_argument("--shards", type=int, help="number of shards")
    parser.add_argument("--shard-size", help='size of one, such as "64MiB"')
    parser.add_argument("--samples", type=int, help="samples in the whole data set")
    parser.add_argument("--rate", type=float, required=True, help="samples per second that one job takes on this node")
    parser.add_argument("--bandwidth", required=True, help='what the store delivers in a second, such as "1.2GB"')
    parser.add_argument("--latency", default="30ms", help="median time to the first byte (default 30ms)")
    parser.add_argument("--latency-sigma", type=float, default=0.5, help="its spread, lognormal (default 0.5)")
    parser.add_argument("--jobs", type=int, default=1, help="jobs over the same data with seeds of their own")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each job on this node")
    parser.add_argument("--epochs", type=int, default=4, help="epochs to simulate; all but the first are averaged")
    parser.add_argument("--shuffle-window", type=int, default=DEFAULT_SHUFFLE_WINDOW, help="as given to RemoteDataset")
    parser.add_argument("--seed", type=int, default=17, help="equal seeds give equal answers")
    parser.set_defaults(run=lambda options: run(options, opened))


def run(options: argparse.Namespace, opened: Callable[[argparse.Namespace], Manifest]) -> int:
    """Print the forecast; 1 if the job would wait.

    Raises:
        ConfigError: The options do not describe a job.
        DaemonError: The simulator failed.
    """
    settings, scale = _settings(options, opened)
    found = _simulated(settings)
    answer = _scaled(found, settings, scale)
    print(json.dumps(answer) if options.json else "\n".join(lines(answer)))
    return 1 if answer["stall"] > SOME_STALL else 0


def lines(answer: dict[str, Any]) -> list[str]:
    """The answer for a person."""
    needed, given = answer["needed_bytes_per_s"], answer["bandwidth_bytes_per_s"]
    rows = [
        ("data set", f"{format_size(answer['dataset_bytes'])} in {answer['num_shards']:,} shards"),
        ("cache", f"{format_size(answer['cache_bytes'])}, {answer['cached_part']:.0%} of it"),
        (
            "from the store",
            f"{format_size(answer['origin_bytes_per_epoch'])} an epoch of all jobs; for one job no policy reads less "
            f"than {format_size(answer['least_origin_bytes_per_epoch'])}",
        ),
        ("hit rate", f"{answer['hit_rate']:.1%}"),
        ("bandwidth", f"{format_size(needed)}/s needed, {format_size(given)}/s given"),
        ("epoch", f"{_duration(answer['epoch_s'])}; from an empty cache {_duration(answer['first_epoch_s'])}"),
        (
            "waiting",
            f"{answer['stall']:.1%} on top of computing; no policy waits less than {answer['least_stall']:.1%}",
        ),
        ("window", f"{format_size(answer['window_bytes'])} fetched ahead at most"),
        (
            "disk writes",
            f"{format_size(answer['written_bytes_per_day'])} a day, "
            f"{answer['written_bytes_per_day'] / answer['cache_bytes']:.1f} times the cache",
        ),
    ]
    if answer["stall"] > SOME_STALL:
        enough = answer["enough_cache_bytes"]
        remedy = f"a cache of {format_size(enough)}" if enough else "no cache alone"
        rows.append(("to end it", f"{remedy}, or {format_size(needed)}/s from the store"))
    if answer["simulated_shards"] < answer["num_shards"]:
        rows.append(("simulated", f"{answer['simulated_shards']:,} shards, and scaled up"))
    return [f"{name:<16}{value}" for name, value in rows]


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _settings(
    options: argparse.Namespace, opened: Callable[[argparse.Namespace], Manifest]
) -> tuple[dict[str, Any], float]:
    """What is simulated, and by how much the data set is larger than that."""
    by_numbers = (options.shards, options.shard_size, options.samples)
    if bool(options.urls) == any(value is not None for value in by_numbers):
        raise ConfigError("plan needs either URLs, or --shards, --shard-size and --samples")
    if not options.cache_size:
        raise ConfigError('plan needs --cache-size, such as "200GiB"')
    if options.urls:
        manifest = opened(options)
        num_shards, total_bytes, num_samples = len(manifest), manifest.total_bytes, manifest.total_samples
    else:
        if None in by_numbers:
            raise ConfigError("--shards, --shard-size and --samples belong together; give all three")
        num_shards, num_samples = options.shards, options.samples
        total_bytes = num_shards * parse_size(options.shard_size, name="--shard-size")
    if num_shards < 1 or total_bytes < num_shards or num_samples < num_shards:
        raise ConfigError(
            f"{num_shards} shards of {total_bytes} bytes with {num_samples} samples are no data set to plan for; each "
            "shard has to hold a byte and a sample"
        )
    simulated = min(num_shards, MOST_SHARDS)
    scale = num_shards / simulated
    samples_per_shard = max(1, round(num_samples / num_shards))
    settings = {
        "num_shards": simulated,
        "shard_bytes": round(total_bytes / num_shards),
        "samples_per_shard": samples_per_shard,
        "cache_bytes": round(parse_size(options.cache_size, name="--cache-size") / scale),
        "samples_per_s": float(options.rate),
        "bandwidth_bytes_per_s": float(parse_size(options.bandwidth, name="--bandwidth")),
        "latency_s": parse_duration(options.latency, name="--latency"),
        "latency_sigma": float(options.latency_sigma),
        "num_jobs": options.jobs,
        "num_ranks": options.ranks,
        "num_epochs": options.epochs,
        "shuffle_window": options.shuffle_window,
        "batch_size": max(1, samples_per_shard // STEPS_PER_SHARD),
        "seed": options.seed,
    }
    return settings, scale


def _simulated(settings: dict[str, Any]) -> dict[str, Any]:
    """The simulator's answer. It is the daemon's planner that decides, so it runs where the daemon would."""
    try:
        finished = subprocess.run(  # noqa: S603
            command(SIMULATOR),
            input=json.dumps({**settings, "remedy": True}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": search_path(SIMULATOR)},
        )
    except subprocess.TimeoutExpired as error:
        raise DaemonError(f"the simulation took longer than {TIMEOUT_S:.0f} s; ask for fewer epochs") from error
    if finished.returncode == 2:
        raise ConfigError(finished.stderr.strip())
    if finished.returncode:
        raise DaemonError(f"the simulation failed: {finished.stderr.strip()[-500:]}")
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def _scaled(found: dict[str, Any], settings: dict[str, Any], scale: float) -> dict[str, Any]:
    answer = dict(found)
    for name in (
        "epoch_s", "first_epoch_s", "origin_bytes_per_epoch", "least_origin_bytes_per_epoch", "requests_per_epoch",
        "kept_bytes", "enough_cache_bytes",
    ):  # fmt: skip
        if answer[name] is not None:
            answer[name] *= scale
    if settings["num_jobs"] == 1:
        # What is read above the least pays for the window, and that is no larger over a larger data set.
        least = answer["least_origin_bytes_per_epoch"]
        excess = max(0.0, found["origin_bytes_per_epoch"] - found["least_origin_bytes_per_epoch"])
        answer["needed_bytes_per_s"] *= (least + excess) / max(1.0, answer["origin_bytes_per_epoch"])
        answer["origin_bytes_per_epoch"] = least + excess
    num_shards = round(settings["num_shards"] * scale)
    answer |= {
        "num_shards": num_shards,
        "simulated_shards": settings["num_shards"],
        "dataset_bytes": num_shards * settings["shard_bytes"],
        "cache_bytes": round(settings["cache_bytes"] * scale),
        "cached_part": min(1.0, settings["cache_bytes"] / (settings["num_shards"] * settings["shard_bytes"])),
        "bandwidth_bytes_per_s": settings["bandwidth_bytes_per_s"],
        "num_jobs": settings["num_jobs"],
    }
    return answer
