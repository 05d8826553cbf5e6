"""Packs scikit-learn's handwritten digits as PNG into WebDataset tars: ``make_digits.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from cacheloader.demo.data import digits, pack

NUM_DIGITS = 1797


def main(folder: str) -> None:
    size_bytes = pack(digits(), Path(folder), count=NUM_DIGITS, samples_per_shard=225, suffix="png", name="digits")
    print(f"{NUM_DIGITS} digits, {size_bytes:,} bytes in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the folder for the shards: make_digits.py FOLDER")
    main(sys.argv[1])
