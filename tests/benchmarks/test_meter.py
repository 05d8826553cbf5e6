from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Measurement, Tally
from benchmarks.harness.meter import Meter, WrongDelivery, sample_checksum
from benchmarks.harness.processes import peak_rss_bytes

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = [("a", b"first"), ("b", b"second"), ("c", b"third")]


@pytest.fixture
def task() -> Task:
    return Task(
        folder="",
        source_folder="",
        reads="",
        shard_names=[],
        shard_bytes=[],
        store=None,
        expected=Tally(
            samples=3,
            size_bytes=16,
            checksum=sum(sample_checksum(key, payload) for key, payload in SAMPLES),
        ),
        batch_size=1,
        num_workers=0,
        warm_epochs=1,
    )


def count(batch):
    return len(batch), sum(len(payload) for _, payload in batch)


def test_a_phase_is_timed_and_counted(task):
    meter = Meter(task)
    with meter.phase("warm", page_cache="none") as clock:
        for _ in range(2):
            clock.take([SAMPLES[:2], SAMPLES[2:]], count)
    meter.verify(iter(SAMPLES))
    phase = meter.measurement({}).phases[0]
    assert (phase.samples, phase.size_bytes, len(phase.epoch_s)) == (6, 32, 2)
    assert 0 < phase.first_batch_s < phase.wall_s
    assert all(epoch_s > 0 for epoch_s in phase.epoch_s)
    assert sum(phase.epoch_s) <= phase.wall_s
    assert 0 <= phase.fetch_p50_s <= phase.fetch_p99_s


@pytest.mark.parametrize("batches", [[SAMPLES[:2]], [SAMPLES, SAMPLES[:1]], [[("a", b"x"), *SAMPLES[1:]]], []])
def test_a_wrong_number_of_samples_or_bytes_fails_the_run(task, batches):
    with (
        pytest.raises(WrongDelivery, match="were asked for"),
        Meter(task).phase("cold", page_cache="none") as clock,
    ):
        clock.take(batches, count)


@pytest.mark.parametrize(
    "samples",
    [
        [("a", b"First"), *SAMPLES[1:]],
        [("b", b"first"), ("a", b"second"), SAMPLES[2]],
        [SAMPLES[0], SAMPLES[0], SAMPLES[2]],
        SAMPLES[:2],
    ],
    ids=["damaged", "wrong key", "repeated", "missing"],
)
def test_wrong_samples_fail_the_verification(task, samples):
    with pytest.raises(WrongDelivery):
        Meter(task).verify(samples)


def test_the_order_of_samples_does_not_matter_to_the_verification(task):
    Meter(task).verify(reversed(SAMPLES))


def test_a_run_that_was_never_verified_has_no_measurement(task):
    with pytest.raises(WrongDelivery, match="never compared"):
        Meter(task).measurement({})


def test_a_measurement_survives_json(task):
    meter = Meter(task)
    with meter.phase("cold", page_cache="none") as clock:
        clock.take([SAMPLES], count)
    meter.verify(SAMPLES)
    measurement = meter.measurement({"workers": 0})
    assert Measurement.from_dict(measurement.to_dict()) == measurement


BURN = """
import time
input()
start = time.process_time()
while time.process_time() - start < 0.2:
    pass
print(time.process_time(), flush=True)  # its start, too, which may come that late
input()
"""

# A process of its own, since a test's has helpers and servers of other tests as children, which spend what they like.
MEASURED = """
import json, subprocess, sys, time
from dataclasses import asdict
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Tally
from benchmarks.harness.meter import Meter

role, burn = sys.argv[1:]
with subprocess.Popen(
    [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=role != "worker"
) as burner:
    task = Task(
        folder="", source_folder="", reads="", shard_names=[], shard_bytes=[], store=None,
        expected=Tally(samples=0, size_bytes=0), batch_size=1, num_workers=0, warm_epochs=1,
        server_pid=burner.pid if role == "server" else 0,
    )
    meter = Meter(task)
    began_s = time.process_time()
    with meter.phase("cold", page_cache="none") as clock:
        burner.stdin.write(b"begin\\n")
        burner.stdin.flush()
        burnt_s = float(burner.stdout.readline())
        clock.take([], lambda batch: (0, 0))
    own_s = time.process_time() - began_s
    burner.communicate(b"end\\n")
meter.verify([])
phase = meter.measurement({}).phases[0]
found = {"cpu_s": asdict(phase.cpu_s), "peak": asdict(phase.peak_memory_bytes), "burnt_s": burnt_s, "own_s": own_s}
print(json.dumps(found))
"""
TICKS_S = 2 / os.sysconf("SC_CLK_TCK")
"""User and system time are told in whole ticks each."""


@pytest.mark.parametrize("role", ["worker", "daemon", "server"])
def test_cpu_time_and_memory_are_charged_to_who_used_them(role):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, role, BURN], cwd=ROOT, stdout=subprocess.PIPE, timeout=110, check=True
    )
    found = json.loads(done.stdout)
    cpu_s, peak, burnt_s, own_s = found["cpu_s"], found["peak"], found["burnt_s"], found["own_s"]
    spent = {"worker": cpu_s["client"], "daemon": cpu_s["daemon"], "server": cpu_s["server"]}
    assert 0.2 - TICKS_S <= spent.pop(role) <= burnt_s + TICKS_S + (own_s if role == "worker" else 0.0)
    if role == "server":
        del spent["daemon"]  # here the server is a child of this process, as a daemon is
    if role != "worker":
        assert spent.pop("worker") <= own_s + TICKS_S
    assert not any(spent.values())
    assert peak["main"] > 1 << 20
    assert (peak["worker"] > 1 << 20) is (role == "worker")
    assert (peak["daemon"] > 1 << 20) is (role != "worker")
    assert min(peak["worker"], peak["daemon"]) == 0


def test_a_process_that_has_ended_has_no_memory():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert peak_rss_bytes(process.pid) == 0
