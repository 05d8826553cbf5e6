"""One rank that trains nothing, in step with others: ``goodput_ranks.py CONFIG.json``, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cacheloader as cl
from cacheloader.goodput import recorder


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with cl.goodput.Run(config["folder"]) as run:
        if config.get("ddp"):
            module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            run.meter.watch(module)
        for number in run.timed(range(config["steps"]), tokens=1):
            if rank == config["late_rank"] and number:
                time.sleep(config["late_s"])
            if config.get("ddp"):
                module(torch.ones(2, 4)).sum().backward()
            else:
                dist.all_reduce(torch.ones(8))
                dist.barrier()
        recorder.ckpt_commit("end", run.last_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
