"""The worked example of docs/order.md, computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cacheloader.order.mixture_schedule import phases_of
from cacheloader.order.mixture_shares import BLOCK_ROWS, Shares
from cacheloader.order.options import OrderOptions
from cacheloader.order.sample_order import SampleOrder

from .model import lane_windows

DOCUMENT = Path(__file__).parents[2] / "docs" / "order.md"
SAMPLES_PER_SHARD = np.array([4, 2, 3, 5, 3])
OPTIONS = OrderOptions(seed=6, lanes=2, shuffle_window=2, tail="pad")
GLOBAL_BATCH = 6
WORLD_SIZE = 3


def blocks() -> list[str]:
    fenced = DOCUMENT.read_text(encoding="utf-8").split("```text\n")[1:]
    return [block.split("```")[0] for block in fenced]


def name(shard: int, sample: int) -> str:
    return f"{shard}.{sample}"


def test_the_lanes_of_the_example_are_those_of_the_code():
    lines = []
    for lane, windows in enumerate(lane_windows(SAMPLES_PER_SHARD, OPTIONS, 0)):
        held = sorted(pair for window in windows for pair in window)
        lines.append(f"lane {lane}: " + " ".join(name(*pair) for pair in held) + "\n")

    assert blocks()[0] == "".join(lines)


def test_the_epoch_of_the_example_is_that_of_the_code():
    lines = []
    for lane, windows in enumerate(lane_windows(SAMPLES_PER_SHARD, OPTIONS, 0)):
        told = " | ".join(" ".join(name(*pair) for pair in window) for window in windows)
        lines.append(f"lane {lane}: {told}\n")

    assert blocks()[1] == "".join(lines)


def test_the_steps_of_the_example_are_those_of_the_code():
    order = SampleOrder(SAMPLES_PER_SHARD, OPTIONS)
    lines = ["row   rank 0      rank 1      rank 2\n"]
    for row in range(0, order.rows_per_epoch, order.rows_per_step(GLOBAL_BATCH)):
        cells = []
        for rank in range(WORLD_SIZE):
            batch = order.batch(epoch=0, row=row, global_batch=GLOBAL_BATCH, rank=rank, world_size=WORLD_SIZE)
            samples = zip(batch.shard, batch.sample, batch.padded, strict=True)
            cells.append(" ".join(name(shard, sample) + "*" * bool(padded) for shard, sample, padded in samples))
        lines.append(f"{row:<6}" + "".join(f"{cell:<12}" for cell in cells).rstrip() + "\n")

    assert blocks()[2] == "".join(lines)


def test_the_accesses_of_the_example_are_those_of_the_code():
    accesses = SampleOrder(SAMPLES_PER_SHARD, OPTIONS).accesses(
        epoch=0, from_row=0, global_batch=GLOBAL_BATCH, rank=1, world_size=WORLD_SIZE
    )
    lines = [
        f"shard {shard}: rows [{first}, {stop})\n"
        for shard, first, stop in zip(accesses.shard, accesses.first_row, accesses.stop_row, strict=True)
    ]

    assert blocks()[3] == "".join(lines)


def test_the_shares_of_the_example_are_those_of_the_code():
    shares = Shares(phases_of({"code": 0.3, "web": 0.7}, [], names=["code", "web"], lanes=1))
    lines = ["block   web    code   web, all   exact      code, all   exact\n"]
    for block in range(4):
        (code_before, web_before), (code, web) = shares.before(block), shares.before(block + 1)
        places = (block + 1) * BLOCK_ROWS
        lines.append(
            f"{block:<8}{web - web_before:<7}{code - code_before:<7}{web:>8}{places * 0.7:>10.1f}"
            f"{code:>13}{places * 0.3:>10.1f}\n"
        )

    assert blocks()[4] == "".join(lines)
