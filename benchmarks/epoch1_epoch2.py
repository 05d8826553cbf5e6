"""Epoch 1 and epoch 2 of a training loop on this machine: how fast, how long it waited, how often it asked the store.

    python benchmarks/epoch1_epoch2.py                          # JPEGs of its own, from an S3 server on this machine
    python benchmarks/epoch1_epoch2.py "s3://bucket/train-{000000..000255}.tar" --batch-size 256 --num-workers 8
    torchrun --nproc-per-node=8 benchmarks/epoch1_epoch2.py s3://bucket/imagenet/ --cache-dir /nvme/cache

With CUDA, each step is the forward and backward pass of a residual network on the decoded images. Without, each step
sleeps as long as ``--step-ms`` says, as a thread does that waits for a device: a network on the CPU would compete with
the decoding for the same cores and measure that.

Every rank writes events to ``--run``, which ``cacheloader goodput`` reads; rank 0 prints the table and writes JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import cacheloader as cl
from cacheloader.config import TransportOptions
from cacheloader.errors import CacheloaderError
from cacheloader.transport.control import read_status, stop_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIDE = 224
IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch of one rank showed.

    Attributes:
        epoch: From 1.
        samples: Of this rank.
        wall_s: From before the first ``next()`` to the last sample.
        samples_per_s: Of this rank.
        first_batch_s: Until the first batch was there.
        waiting_s: Sum of ``fetch_seconds``.
        waiting_share: Part of the wall time.
        fetch_p50_ms: Median of ``fetch_seconds``.
        fetch_p99_ms: 99th percentile.
        fetch_max_ms: Longest.
        origin_bytes: Bytes of shards that this node's daemon read from the store meanwhile; ``None`` without a daemon.
    """

    epoch: int
    samples: int
    wall_s: float
    samples_per_s: float
    first_batch_s: float
    waiting_s: float
    waiting_share: float
    fetch_p50_ms: float
    fetch_p99_ms: float
    fetch_max_ms: float
    origin_bytes: int | None


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """The image of a sample, uint8 [3, SIDE, SIDE], and its label, 0 if it has none."""
    encoded = next((sample[field] for field in IMAGE_FIELDS if field in sample), None)
    if encoded is None:
        raise ValueError(f"sample {sample['__key__']} has no image; its fields are {', '.join(sample)}")
    with Image.open(io.BytesIO(encoded)) as image:
        image.draft("RGB", (SIDE, SIDE))
        pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    label = sample.get("cls", b"0")
    return {"image": torch.from_numpy(pixels.transpose(2, 0, 1).copy()), "label": int(label)}


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Float [batch, channels, height, width]."""
        return torch.relu(self.body(x) + self.shortcut(x))


def network(classes: int = 1000) -> nn.Module:
    """A residual network of the size of ResNet-18."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = 64
    for width in widths:
        layers.append(Block(before, width, 2 if width != before else 1))
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def device_step(device: torch.device) -> Callable[[dict[str, torch.Tensor]], None]:
    """Forward, backward and update on ``device``."""
    model = network().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: dict[str, torch.Tensor]) -> None:
        images = batch["image"].to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = batch["label"].to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def measure_epoch(loader: cl.DataLoader, step: Callable[[Any], None], *, sent: Callable[[], int | None]) -> Epoch:
    """Train one epoch."""
    before, begin = sent(), time.perf_counter()
    number = loader.epoch + 1
    fetch_s: list[float] = []
    samples, first_batch_s = 0, 0.0
    for batch in loader:
        first_batch_s = first_batch_s or time.perf_counter() - begin
        fetch_s.append(loader.last_fetch_seconds)
        step(batch)
        samples += len(batch["label"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - begin
    after = sent()
    return Epoch(
        epoch=number,
        samples=samples,
        wall_s=wall_s,
        samples_per_s=samples / wall_s,
        first_batch_s=first_batch_s,
        waiting_s=sum(fetch_s),
        waiting_share=sum(fetch_s) / wall_s,
        fetch_p50_ms=float(np.percentile(fetch_s, 50)) * 1e3,
        fetch_p99_ms=float(np.percentile(fetch_s, 99)) * 1e3,
        fetch_max_ms=max(fetch_s) * 1e3,
        origin_bytes=None if before is None or after is None else after - before,
    )


def origin_bytes(options: TransportOptions) -> Callable[[], int | None]:
    """A function that asks the node's daemon how many bytes it has read from the store so far."""

    def ask() -> int | None:
        try:
            account = read_status(options)["account"]
        except CacheloaderError:
            return None
        return int(sum(account["remote_read_bytes"].values()))

    return ask


@contextmanager
def data_set(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """URL and storage options: the user's, or a set of JPEGs in an S3 server that runs for as long as the block."""
    if options.url:
        yield options.url, options.storage_options
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("epoch1_epoch2: several ranks need a data set that all of them reach; name its URL")
    # As a script, this file's own folder is where modules are looked for, not the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.harness.packing import pack_pictures
    from benchmarks.harness.store import running_store

    with tempfile.TemporaryDirectory(prefix="epoch1-epoch2-") as scratch:
        folder = Path(scratch)
        print(f"packing {options.samples:,} JPEGs and starting an S3 server", flush=True)
        packed = pack_pictures(folder / "packed", samples=options.samples, shards=16, delivered=lambda jpeg: jpeg)
        with running_store(folder / "store") as running:
            store = running.upload(packed, "pictures/", with_counts=True)
            storage_options = store.storage_options
            yield f"s3://{store.bucket}/{store.prefix}", storage_options


def main() -> int:
    """Command line."""
    options = _parser().parse_args()
    torch.manual_seed(0)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    # A shared daemon has a cache of its own; then epoch 1 is as cold as that is.
    cache_dir = None if options.daemon else options.cache_dir or tempfile.mkdtemp(prefix="epoch1-epoch2-cache-")
    try:
        with data_set(options) as (url, storage_options):
            dataset = cl.RemoteDataset(
                url,
                seed=0,
                transform=decode,
                storage_options=storage_options,
                cache_dir=cache_dir,
                cache_size=options.cache_size if cache_dir else None,
                daemon=options.daemon,
            )
            loader = cl.DataLoader(
                dataset,
                batch_size=options.batch_size,
                num_workers=options.num_workers,
                persistent_workers=options.num_workers > 0,
                pin_memory=has_cuda,
            )
            step = device_step(device) if has_cuda else lambda _batch: time.sleep(options.step_ms / 1e3)
            sent = origin_bytes(TransportOptions(daemon=options.daemon, cache_dir=cache_dir))
            with cl.goodput.Run(options.run):
                epochs = [measure_epoch(loader, step, sent=sent) for _ in range(options.epochs)]
    finally:
        if cache_dir and not options.cache_dir:
            _end(Path(cache_dir))
    if int(os.environ.get("RANK", "0")) == 0:
        compute = torch.cuda.get_device_name(device) if has_cuda else f"none: each step sleeps {options.step_ms:g} ms"
        report(epochs, options, compute=compute)
    return 0


def report(epochs: list[Epoch], options: argparse.Namespace, *, compute: str) -> None:
    """Print the table and write the JSON."""
    print(f"\ndevice: {compute}; batch {options.batch_size}, {options.num_workers} workers\n")
    print("epoch  samples/s  first batch  waiting   fetch p50     p99     max   read from the store")
    for one in epochs:
        read = "unknown" if one.origin_bytes is None else f"{one.origin_bytes / 2**20:,.1f} MiB"
        print(
            f"{one.epoch:>5}  {one.samples_per_s:>9,.0f}  {one.first_batch_s:>9.2f} s  {one.waiting_share:>7.2%}"
            f"  {one.fetch_p50_ms:>7.2f} ms  {one.fetch_p99_ms:>5.1f}  {one.fetch_max_ms:>6.1f}   {read}"
        )
    content = {
        "device": compute,
        "torch": torch.__version__,
        "cacheloader": cl.__version__,
        "batch_size": options.batch_size,
        "num_workers": options.num_workers,
        "url": options.url or "JPEGs of its own",
        "epochs": [asdict(one) for one in epochs],
    }
    Path(options.output).write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwrote {options.output}; where the time went: cacheloader goodput {options.run}")


def _end(cache_dir: Path) -> None:
    with suppress(CacheloaderError):
        stop_daemon(cache_dir)
    shutil.rmtree(cache_dir, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="WebDataset shards with images; default: a set of its own")
    parser.add_argument("--storage-options", type=json.loads, help="JSON, as for RemoteDataset")
    parser.add_argument("--samples", type=int, default=4096, help="size of the set of its own (default 4096)")
    parser.add_argument("--batch-size", type=int, default=64, help="per rank (default 64)")
    parser.add_argument("--num-workers", type=int, default=2, help="per rank (default 2)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=50.0, help="a step without CUDA (default 50)")
    parser.add_argument("--cache-dir", help="default: an empty one, removed at the end, so that epoch 1 is cold")
    parser.add_argument("--cache-size", help="most bytes of the cache (default: as RemoteDataset chooses)")
    parser.add_argument("--daemon", help="address of a shared daemon, unix:///path")
    parser.add_argument("--run", default="epoch1_epoch2_run", help="folder for the goodput events")
    parser.add_argument("--output", default="epoch1_epoch2.json")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CacheloaderError as error:
        sys.exit(f"epoch1_epoch2: {error}")
