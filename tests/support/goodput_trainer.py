"""One rank of a job that suffers on purpose: ``goodput_trainer.py CONFIG.json``, under torchrun.

Beside the events that the goodput room records by itself, it writes what it did by its own clock, the truth that a
report is compared with. Its device is a sleep; its checkpoints hold the loader's position.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cacheloader as cl
from cacheloader.goodput import recorder
from cacheloader.transport.reporting import RunWatch
from tests.support.goodput_witness import THROTTLED

HELD_S = 0.25
"""What sleeps for a hundredth of a second and takes so long was held up, by the machine or by who stopped it."""


class Truth:
    """A line for everything that happened, on the wall clock."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._fd = os.open(folder / f"truth-{attempt}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, what: str, begin: float = 0.0, **more: Any) -> float:
        now = time.time()
        os.write(self._fd, json.dumps({"what": what, "begin": begin or now, "end": now, **more}).encode() + b"\n")
        return now


def key_of(sample: dict[str, Any]) -> str:
    return str(sample["__key__"])


def strike(truth: Truth, kind: str, step: int) -> None:
    """Do to this process what a plan says, wherever its training thread is now."""
    truth.tell(kind, step=step)
    os.kill(os.getpid(), getattr(signal, kind))


def feel(truth: Truth) -> None:
    """In a thread: write down when this process was held up, since two clocks that it reads then differ by that."""
    while True:
        before = time.time()
        time.sleep(0.01)
        if time.time() - before > HELD_S:
            truth.tell("held", before)


def assemble(store: dist.Store, attempt: int, rank: int) -> None:
    """Wait until every rank has come this far: imports take long on a busy machine, longer than a hang shall last."""
    store.set(f"here-{attempt}-{rank}", "")
    everybody = [f"here-{attempt}-{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everybody, datetime.timedelta(seconds=120))


def main(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    truth = Truth(folder, attempt, rank)
    torch.set_num_threads(1)
    # The agent's store lives on when it starts the ranks again, and gloo would find the addresses of dead ones in it.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    assemble(agent, attempt, rank)
    dist.init_process_group(
        "gloo",
        timeout=datetime.timedelta(seconds=config["timeout_s"]),
        store=dist.PrefixStore(f"attempt-{attempt}", agent),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    loader = cl.DataLoader(
        cl.RemoteDataset(
            config["urls"], seed=3, transform=key_of, shuffle_window=1, cache_dir=config["cache_dir"],
            cache_size=config["cache_size"], storage_options=config["storage_options"],
        ),
        batch_size=4, num_workers=1, prefetch_factor=2, collate_fn=list,
    )  # fmt: skip
    saved = folder / "checkpoint.json"
    step = 0
    if saved.exists():
        checkpoint = json.loads(saved.read_text())
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]
        recorder.restore(f"step-{step}", step)
    truth.tell("restored", step=step)
    RunWatch.PATIENCE_S = 30.0  # what a daemon that is busy for longer does not hear, it cannot witness
    threading.Thread(target=feel, args=[truth], daemon=True).start()
    with cl.goodput.Run(config["run"]):
        try:
            train(config, loader, truth, attempt, rank, step)
        except RuntimeError:
            truth.tell("error")
            raise
    truth.tell("done")
    dist.destroy_process_group()


def train(config: dict[str, Any], loader: Any, truth: Truth, attempt: int, rank: int, step: int) -> None:
    saved = Path(config["folder"]) / "checkpoint.json"
    strikes = {(f["attempt"], f["rank"], f["step"]): f for f in config["strikes"]}
    slow = config["slow"]
    while True:
        batches = iter(loader)
        while True:
            begin = time.time()
            if (attempt, rank, step + 1) in strikes:
                coming = strikes[attempt, rank, step + 1]
                threading.Timer(coming["delay_s"], strike, (truth, coming["kind"], step + 1)).start()
            try:
                next(batches)
            except StopIteration:
                truth.tell("epoch", begin)
                break
            got = truth.tell("fetch", begin, step=step + 1)
            step += 1
            is_slow = rank == slow["rank"] and slow["first"] <= step < slow["first"] + slow["steps"]
            time.sleep(config["compute_s"] + slow["slow_s"] * is_slow)
            while step == config["throttle_at"] and not (Path(config["folder"]) / THROTTLED).exists():
                time.sleep(0.01)  # until who throttles the store has seen that it is time
            arrived = time.time()
            dist.all_reduce(torch.ones(8))
            truth.tell("collective", arrived, step=step)
            if step % config["save_every"] == 0:
                begin_save = time.time()
                recorder.ckpt_begin(f"step-{step}", step)
                started = time.perf_counter()
                time.sleep(config["save_s"])
                recorder.ckpt_staged(f"step-{step}", step, stall_s=time.perf_counter() - started)
                truth.tell("save", begin_save, step=step)
                if rank == 0:
                    half = saved.with_suffix(".half")
                    half.write_text(json.dumps({"loader": loader.state_dict(), "step": step}))
                    half.replace(saved)
                    recorder.ckpt_commit(f"step-{step}", step)
            truth.tell("step", begin, step=step, got=got)
            if step == config["steps"]:
                return


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
