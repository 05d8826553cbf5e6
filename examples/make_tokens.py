"""Packs text into blocks of tokens in WebDataset tars: ``make_tokens.py FOLDER [TEXT_FILE …]``.

A token is a byte of the text, so that no tokenizer is needed; without files the text is python's own documentation.
Each sample is a block of 129 tokens as ``tokens.npy``: 128 to read and, shifted by one, 128 to predict.
"""

from __future__ import annotations

import io
import pydoc_data.topics
import sys
import tarfile
from pathlib import Path

import numpy as np

BLOCK = 128
BLOCKS_PER_SHARD = 500


def main(folder: str, *texts: str) -> None:
    if texts:
        text = b"\n".join(Path(path).read_bytes() for path in texts)
    else:
        text = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    num_blocks = (len(tokens) - 1) // BLOCK
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for first in range(0, num_blocks, BLOCKS_PER_SHARD):
        with tarfile.open(target / f"tokens-{first // BLOCKS_PER_SHARD:05d}.tar", "w") as shard:
            for block in range(first, min(first + BLOCKS_PER_SHARD, num_blocks)):
                buffer = io.BytesIO()
                np.save(buffer, tokens[block * BLOCK : (block + 1) * BLOCK + 1])
                member = tarfile.TarInfo(f"{block:08d}.tokens.npy")
                member.size = buffer.tell()
                buffer.seek(0)
                shard.addfile(member, buffer)
    print(f"{num_blocks:,} blocks of {BLOCK} tokens in {folder}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name the folder for the shards: make_tokens.py FOLDER [TEXT_FILE …]")
    main(*sys.argv[1:])
