"""The demo, step by step: store, data, two epochs, a kill, a resume, and what each of them showed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from cacheloader.demo import data
from cacheloader.demo.link import SlowLink
from cacheloader.demo.seaweedfs import SeaweedServer
from cacheloader.errors import CacheloaderError, ConfigError
from cacheloader.quantity import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUCKET = "demo"
BATCH_SIZE = 64
KILL_AT_BATCH = 12
MIN_JPEGS = 2 * KILL_AT_BATCH * BATCH_SIZE
LINK_BYTES_PER_S = 20 * 10**6
LINK_DELAY_S = 0.02
STEP_TIMEOUT_S = 120.0


class DemoFailed(CacheloaderError):
    """A step of the demo did not show what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One training job: a data set in the store and a folder for its log and checkpoint."""

    name: str
    num_samples: int
    config: dict[str, Any]
    config_path: Path

    @property
    def log(self) -> Path:
        return Path(self.config["log"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """What one epoch of one job showed.

    Attributes:
        job: Name of the data set.
        epoch: From 0.
        samples_per_s: Samples trained on per second of the epoch.
        origin_bytes: Bytes that left the object store meanwhile, counted on the link to it.
        local_bytes: Bytes of the samples that the workers read from the cache.
        fetch_p50_s: Median time that the training loop waited for a batch.
        fetch_p99_s: 99th percentile of that time.
        accuracy: Fraction of training samples classified rightly.
    """

    job: str
    epoch: int
    samples_per_s: float
    origin_bytes: int
    local_bytes: int
    fetch_p50_s: float
    fetch_p99_s: float
    accuracy: float


def run(*, num_jpegs: int = 2400, keep: bool = False, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the demo in a temporary folder.

    Args:
        num_jpegs: Size of the synthetic data set.
        keep: Leave the folder there.
        say: Where the story goes.

    Returns:
        Every figure that was shown.

    Raises:
        ConfigError: ``num_jpegs`` is too small for the story.
        DemoFailed: A step did not show what it should.
    """
    if num_jpegs < MIN_JPEGS:
        raise ConfigError(
            f"num_jpegs={num_jpegs} is below {MIN_JPEGS}: the job would be over before it can be killed; pass more"
        )
    folder = Path(tempfile.mkdtemp(prefix="cacheloader-demo-"))
    server = SeaweedServer(folder / "store")
    try:
        say("[1/5] starting a real S3 server (SeaweedFS) on this machine")
        server.start()
        with SlowLink(port=server.port, bytes_per_s=LINK_BYTES_PER_S, delay_s=LINK_DELAY_S) as link:
            say(
                f"      it answers on {server.endpoint_url}; the job reaches it over a link slowed to "
                f"{LINK_BYTES_PER_S / 1e6:.0f} MB/s and {LINK_DELAY_S * 1e3:.0f} ms, as over a network"
            )
            say("[2/5] packing and uploading two data sets as WebDataset tar shards")
            jobs = _prepare(folder, server, link, num_jpegs=num_jpegs, say=say)
            say("[3/5] training a small CNN with 2 loader workers, two epochs each; the cache starts empty")
            epochs = [result for job in jobs for result in _train_two_epochs(job, link)]
            say(_table(epochs))
            say("[4/5] third epoch of the JPEGs: saving the position every few batches, then SIGKILL")
            resumed = _kill_and_resume(jobs[-1], say)
            say("[5/5] stopping the daemon and the server")
        return {"epochs": [_plain(result) for result in epochs], "resume": resumed}
    finally:
        _stop_daemon(folder / "cache")
        server.stop()
        if keep:
            say(f"      kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _prepare(
    folder: Path, server: SeaweedServer, link: SlowLink, *, num_jpegs: int, say: Callable[[str], None]
) -> list[_Job]:
    client = server.client()
    client.create_bucket(Bucket=BUCKET)
    options = server.storage_options | {"endpoint_url": f"http://127.0.0.1:{link.port}"}
    jobs = []
    for name, label, samples, count, per_shard, suffix in (
        ("digits", "handwritten digits (scikit-learn)", data.digits(), 1797, 225, "png"),
        ("stripes", "synthetic JPEGs", data.gratings(num_jpegs), num_jpegs, num_jpegs // 16, "jpg"),
    ):
        shards = folder / "pack" / name
        size_bytes = data.pack(samples, shards, count=count, samples_per_shard=per_shard, suffix=suffix, name=name)
        paths = sorted(shards.iterdir())
        for path in tqdm(paths, desc=f"uploading {name}", unit=" objects", leave=False, disable=None):
            client.put_object(Bucket=BUCKET, Key=f"{name}/{path.name}", Body=path.read_bytes())
        say(f"      s3://{BUCKET}/{name}/  {count:,} {label}, {len(paths) - 1} shards, {format_size(size_bytes)}")
        jobs.append(_job(folder, name, num_samples=count, storage_options=options))
    return jobs


def _job(folder: Path, name: str, *, num_samples: int, storage_options: dict[str, Any]) -> _Job:
    home = folder / "jobs" / name
    home.mkdir(parents=True)
    config = {
        "urls": f"s3://{BUCKET}/{name}/",
        "storage_options": storage_options,
        "seed": 17,
        "cache_dir": str(folder / "cache"),
        "cache_size": "2GiB",
        "batch_size": BATCH_SIZE,
        "shuffle_window": 2,
        "checkpoint": str(home / "checkpoint.pt"),
        "log": str(home / "log.jsonl"),
        "epochs": 2,
        "save_every": 0,
    }
    path = home / "config.json"
    path.write_text(json.dumps(config))
    return _Job(name=name, num_samples=num_samples, config=config, config_path=path)


def _train_two_epochs(job: _Job, link: SlowLink) -> Iterator[EpochResult]:
    sent = [link.sent_bytes]
    rows: list[dict[str, Any]] = []
    with (
        _Trainer(job) as trainer,
        tqdm(total=2 * job.num_samples, unit=" samples", desc=job.name, leave=False, disable=None) as bar,
    ):
        for row in trainer.rows():
            if "keys" not in row:
                continue
            if rows and row["epoch"] != rows[-1]["epoch"]:
                sent.append(link.sent_bytes)
            rows.append(row)
            bar.update(len(row["keys"]))
    sent.append(link.sent_bytes)
    for epoch in range(2):
        mine = [row for row in rows if row["epoch"] == epoch]
        delivered = sum(len(row["keys"]) for row in mine)
        if delivered != job.num_samples:
            raise DemoFailed(f"epoch {epoch} of {job.name} delivered {delivered} samples of {job.num_samples}")
        waits = [row["fetch_seconds"] for row in mine]
        yield EpochResult(
            job=job.name,
            epoch=epoch,
            samples_per_s=delivered / mine[-1]["elapsed_s"],
            origin_bytes=sent[epoch + 1] - sent[epoch],
            local_bytes=sum(row["read_bytes"] for row in mine),
            fetch_p50_s=float(np.percentile(waits, 50)),
            fetch_p99_s=float(np.percentile(waits, 99)),
            accuracy=sum(row["correct"] for row in mine) / delivered,
        )


def _kill_and_resume(job: _Job, say: Callable[[str], None]) -> dict[str, Any]:
    job.config_path.write_text(json.dumps(job.config | {"epochs": 3, "save_every": 5}))
    job.log.unlink()
    before = _third_epoch_until_killed(job)
    job.log.unlink()
    with _Trainer(job) as trainer:
        position, *after = trainer.rows()
    saved_batches = position["position"]["row"] // BATCH_SIZE
    say(
        f"      killed the trainer after batch {len(before)} of {-(-job.num_samples // BATCH_SIZE)}; "
        f"the last saved position is batch {saved_batches}"
    )
    kept = [key for row in before[:saved_batches] for key in row["keys"]]
    resumed = [key for row in after for key in row["keys"]]
    whole = _whole_epoch(job, 2)
    missing, repeated = len(set(whole) - {*kept, *resumed}), len(kept) + len(resumed) - len({*kept, *resumed})
    say(f"      started it again with the same command line: it went on at sample {resumed[0]!r}")
    say(
        f"      an uninterrupted epoch has {whole[len(kept)]!r} in that place; over kill and resume "
        f"{len({*kept, *resumed}):,} of {job.num_samples:,} samples, {repeated} repeated, {missing} missing, "
        f"order {'identical' if kept + resumed == whole else 'DIFFERENT'}"
    )
    if kept + resumed != whole or len(set(whole)) != job.num_samples:
        raise DemoFailed("the resumed job did not go on where the killed one was saved")
    return {
        "killed_after_batch": len(before),
        "saved_at_batch": saved_batches,
        "first_resumed_sample": resumed[0],
        "repeated": repeated,
        "missing": missing,
    }


def _third_epoch_until_killed(job: _Job) -> list[dict[str, Any]]:
    """Rows of the third epoch up to a kill some batches behind a saved position."""
    rows: list[dict[str, Any]] = []
    with _Trainer(job) as trainer:
        for row in trainer.rows():
            if row.get("epoch") == 2:
                rows.append(row)
            if len(rows) == KILL_AT_BATCH:
                trainer.kill()
                rows += [row for row in trainer.rest() if row.get("epoch") == 2]
                break
    return rows


def _whole_epoch(job: _Job, epoch: int) -> list[str]:
    command = [sys.executable, "-m", "cacheloader.demo.trainer", str(job.config_path), str(epoch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
    if done.returncode:
        raise DemoFailed(f"listing epoch {epoch} of {job.name} failed: {done.stderr[-2000:]}")
    keys: list[str] = json.loads(done.stdout.splitlines()[-1])
    return keys


class _Trainer:
    """A trainer process and the log it writes."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._errors = job.config_path.with_name("stderr.txt")
        self._read_bytes = 0

    def __enter__(self) -> _Trainer:
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cacheloader.demo.trainer", str(self._job.config_path)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL for the trainer and its workers; calling it again does nothing."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Log rows as they are written, until the trainer ends."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while True:
            running = self._process.poll() is None
            yield from self.rest()
            if not running:
                break
            if time.monotonic() > deadline:
                raise DemoFailed(f"training {self._job.name} took more than {STEP_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        if self._process.returncode:
            raise DemoFailed(f"training {self._job.name} failed: {self._errors.read_text()[-3000:]}")

    def rest(self) -> list[dict[str, Any]]:
        """Complete log rows that have not been read yet."""
        if not self._job.log.exists():
            return []
        with self._job.log.open("rb") as log:
            log.seek(self._read_bytes)
            lines = log.read()
        complete = lines[: lines.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def _stop_daemon(cache_dir: Path) -> None:
    from cacheloader.transport.control import stop_daemon

    stop_daemon(cache_dir)


def _table(epochs: list[EpochResult]) -> str:
    head = ("data", "epoch", "samples/s", "from origin", "from NVMe", "fetch p50", "fetch p99", "accuracy")
    rows = [
        (
            result.job,
            str(result.epoch + 1),
            f"{result.samples_per_s:,.0f}",
            format_size(result.origin_bytes),
            format_size(result.local_bytes),
            f"{result.fetch_p50_s * 1e3:.1f} ms",
            f"{result.fetch_p99_s * 1e3:.1f} ms",
            f"{result.accuracy:.1%}",
        )
        for result in epochs
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "      " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    )


def _plain(result: EpochResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in EpochResult.__slots__}
