"""What the demo trains on: scikit-learn's handwritten digits, and a synthetic set of JPEGs large enough to time."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

JPEG_SIDE_PIXELS = 320
"""About 60 KB a file at quality 90: the size of a web image."""


def digits() -> Iterator[tuple[NDArray[np.uint8], int]]:
    """1,797 real handwritten digits: uint8 [8, 8] and the digit."""
    data = load_digits()
    for image, label in zip(data.images, data.target, strict=True):
        yield (image * (255 / 16)).astype(np.uint8), int(label)


def gratings(count: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """``count`` noisy stripe patterns: uint8 [side, side, 3] and which of 10 directions the stripes have."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:JPEG_SIDE_PIXELS, :JPEG_SIDE_PIXELS].astype(np.float32)
    noise = rng.normal(0, 40, size=(2 * JPEG_SIDE_PIXELS, 2 * JPEG_SIDE_PIXELS, 3)).astype(np.float32)
    for i in range(count):
        label = i % 10
        angle = np.pi * label / 10
        stripes = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 0.15 + rng.uniform(0, 6))
        top, left = rng.integers(0, JPEG_SIDE_PIXELS, size=2)
        pixels = 128 + 60 * stripes[:, :, None] + noise[top : top + JPEG_SIDE_PIXELS, left : left + JPEG_SIDE_PIXELS]
        yield np.clip(pixels, 0, 255).astype(np.uint8), label


def pack(
    samples: Iterator[tuple[NDArray[np.uint8], int]],
    folder: Path,
    *,
    count: int,
    samples_per_shard: int,
    suffix: str,
    name: str,
) -> int:
    """Write samples as WebDataset tar shards with their sample counts beside them.

    Args:
        samples: Images and labels.
        folder: Where the shards go.
        count: How many samples there are, for the progress bar.
        samples_per_shard: Size of one shard.
        suffix: Image format, ``"png"`` or ``"jpg"``.
        name: What the progress bar says.

    Returns:
        Bytes of all shards.
    """
    folder.mkdir(parents=True)
    counts: list[dict[str, object]] = []
    bar = tqdm(total=count, desc=name, unit=" samples", leave=False, disable=None)
    pending: list[tuple[str, bytes, int]] = []

    def flush() -> None:
        if not pending:
            return
        shard = f"shard-{len(counts):06d}.tar"
        with tarfile.open(folder / shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, image, label in pending:
                for field, content in ((suffix, image), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{key}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        counts.append({"url": shard, "nsamples": len(pending)})
        pending.clear()

    for i, (pixels, label) in enumerate(samples):
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "JPEG" if suffix == "jpg" else "PNG", quality=90)
        pending.append((f"{i:07d}", encoded.getvalue(), label))
        if len(pending) == samples_per_shard:
            flush()
        bar.update()
    flush()
    bar.close()
    (folder / "shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": counts}))
    return sum(path.stat().st_size for path in folder.glob("*.tar"))
