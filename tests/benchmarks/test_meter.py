from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Measurement, Tally
from benchmarks.harness.meter import Meter, WrongDelivery, sample_checksum
from benchmarks.harness.processes import Snapshot, peak_rss_bytes

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
print("done", flush=True)
input()
"""


@pytest.mark.parametrize("role", ["worker", "daemon", "server"])
def test_cpu_time_and_memory_are_charged_to_who_used_them(task, role):
    # Whatever ran in this process before may have left helpers of its own, such as multiprocessing's resource tracker.
    own, _ = Snapshot.take().by_session(os.getpid())
    others = max(map(peak_rss_bytes, own - {os.getpid()}), default=0)
    with (
        subprocess.Popen(
            [sys.executable, "-c", BURN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=role != "worker",
        ) as burner,
    ):
        meter = Meter(replace(task, server_pid=burner.pid if role == "server" else 0))
        with meter.phase("cold", page_cache="none") as clock:
            burner.stdin.write(b"begin\n")
            burner.stdin.flush()
            assert burner.stdout.readline() == b"done\n"
            clock.take([SAMPLES], count)
        burner.communicate(b"end\n")
    meter.verify(SAMPLES)
    phase = meter.measurement({}).phases[0]
    spent = {"worker": phase.cpu_s.client, "daemon": phase.cpu_s.daemon, "server": phase.cpu_s.server}
    assert spent.pop(role) >= 0.18
    if role == "server":
        del spent["daemon"]  # here the server is a child of this process, as a daemon is
    assert max(spent.values()) < 0.1
    assert phase.peak_memory_bytes.main > 1 << 20
    if role == "worker":
        assert phase.peak_memory_bytes.worker > 1 << 20
    else:
        # They may have grown since.
        assert phase.peak_memory_bytes.worker <= others + 2**20
    assert (phase.peak_memory_bytes.daemon > 1 << 20) is (role != "worker")


def test_a_process_that_has_ended_has_no_memory():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert peak_rss_bytes(process.pid) == 0
