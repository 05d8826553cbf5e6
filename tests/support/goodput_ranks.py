"""One rank that trains nothing, in step with others: ``goodput_ranks.py CONFIG.json``, with RANK and WORLD_SIZE set.

Of each collective it writes down itself how long it stayed there: between what a clock says that is read further inside
than the meter's and what one says that is read further outside, so that the meter's answer must lie between the two
wherever this process is held up.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import cacheloader as cl
from cacheloader.goodput import recorder

if TYPE_CHECKING:
    from collections.abc import Callable

inner_s: list[float] = []
outer_s: list[float] = []


def timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed_call(*arguments: Any) -> Any:
        begin_s = time.perf_counter()
        answer = call(*arguments)
        into.append(time.perf_counter() - begin_s)
        return answer

    return timed_call


def timed_hook(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def timed_call(group: Any, bucket: Any) -> Any:
        begin_s, is_last = time.perf_counter(), bucket.is_last()

        def done(finished: Any) -> Any:
            if is_last:
                inner_s.append(time.perf_counter() - begin_s)
            return finished.value()

        return hook(group, bucket).then(done)

    return timed_call


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{config['folder']}.store",  # no port, which somebody else may take meanwhile
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=250),
    )
    if config["ddp"]:
        default_hooks.allreduce_hook = timed_hook(default_hooks.allreduce_hook)
    else:
        for name in ("all_reduce", "barrier"):
            setattr(dist, name, timed(getattr(dist, name), inner_s))
    stays: list[list[tuple[float, float]]] = []
    with cl.goodput.Run(config["folder"]) as run:
        if config["ddp"]:
            module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            run.meter.watch(module)
        for number in run.timed(range(config["steps"]), tokens=1):
            if rank == config["late_rank"] and number:
                time.sleep(config["late_s"])
            inner_s.clear()
            outer_s.clear()
            if config["ddp"]:
                timed(module(torch.ones(2, 4)).sum().backward, outer_s)()
            else:
                timed(dist.all_reduce, outer_s)(torch.ones(8))
                timed(dist.barrier, outer_s)()
            stays.append(list(zip(inner_s, outer_s, strict=True)))
        recorder.ckpt_commit("end", run.last_step)
    Path(f"{config['folder']}.stays-{rank}.json").write_text(json.dumps(stays))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
