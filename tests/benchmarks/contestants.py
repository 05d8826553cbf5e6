"""Contestants that misbehave, for the runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness.contestant import Task
    from benchmarks.harness.measurement import Measurement
    from benchmarks.harness.meter import Meter


class _Idle:
    def prepare(self, task: Task) -> None:
        pass


class Crashes(_Idle):
    def run(self, task: Task, meter: Meter) -> Measurement:
        raise RuntimeError("on purpose\nin some file\nthe end")


class Dies(_Idle):
    def run(self, task: Task, meter: Meter) -> Measurement:
        sys.stderr.write("its last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Hangs(_Idle):
    def run(self, task: Task, meter: Meter) -> Measurement:
        threading.Event().wait()
        raise AssertionError


class LosesASample(_Idle):
    def run(self, task: Task, meter: Meter) -> Measurement:
        with meter.phase("cold", page_cache="none") as clock:
            clock.take([b"a"], lambda batch: (1, len(batch)))
        raise AssertionError


class LeavesAProcess(_Idle):
    def run(self, task: Task, meter: Meter) -> Measurement:
        left = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, stdout=subprocess.DEVNULL
        )
        with meter.phase("cold", page_cache="none") as clock:
            clock.take([b"a", b"b"], lambda batch: (1, len(batch)))
        meter.verify([("a", b"x"), ("b", b"x")])
        return meter.measurement({"left": [left.pid]})
