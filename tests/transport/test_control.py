from __future__ import annotations

import _thread
import os
import sys

import pytest

from cacheloader.config import TransportOptions
from cacheloader.errors import DaemonUnavailable
from cacheloader.transport.control import read_status, stop_daemon
from cacheloader.transport.reporting import FetchReporter
from tests.contract.transports import Backend, running
from tests.support.waiting import wait_until

PATIENCE_S = 60.0


def num_samples(backend: Backend) -> int:
    assert backend.options is not None
    return read_status(backend.options, timeout_s=PATIENCE_S)["account"]["samples"]


@pytest.fixture
def patient(monkeypatch):
    """A report is dropped if the daemon does not take it in a moment; on a busy machine it may need more than that."""
    monkeypatch.setattr(FetchReporter, "PATIENCE_S", PATIENCE_S)


def test_running_daemon_tells_its_statistics_and_leaves_when_it_is_asked(tmp_path):
    with running("embedded", tmp_path) as backend:
        assert backend.options is not None
        backend.session().open_dataset(backend.spec())
        assert isinstance(read_status(backend.options, timeout_s=PATIENCE_S), dict)
        assert stop_daemon(backend.options.directory, timeout_s=PATIENCE_S)
        assert not stop_daemon(backend.options.directory, timeout_s=PATIENCE_S)
        backend.close()


def test_daemon_that_does_not_run_is_not_started_by_a_question(tmp_path):
    with pytest.raises(DaemonUnavailable, match=str(tmp_path)):
        read_status(TransportOptions(daemon="embedded", cache_dir=tmp_path))
    assert not stop_daemon(tmp_path)


@pytest.mark.usefixtures("patient")
def test_waiting_times_reach_the_daemon_and_a_missing_one_costs_nothing(tmp_path):
    with running("embedded", tmp_path) as backend:
        assert backend.options is not None
        backend.session().open_dataset(backend.spec())
        reporter = FetchReporter(backend.options)
        for seconds in (0.001, 0.002, 0.2):
            reporter.add(seconds, 8)
        reporter.flush()
        wait_until(lambda: num_samples(backend) == 24)
        waits = read_status(backend.options, timeout_s=PATIENCE_S)["account"]["batch_wait_s"]
        assert (sum(waits["counts"]), round(waits["total"], 6)) == (3, 0.203)
        reporter.close()
        backend.close()
    nobody = FetchReporter(TransportOptions(daemon="embedded", cache_dir=tmp_path / "none"))
    nobody.add(0.1, 8)
    nobody.flush()
    nobody.close()


@pytest.mark.usefixtures("patient")
def test_a_forked_process_reports_by_itself(tmp_path):
    with running("embedded", tmp_path) as backend:
        assert backend.options is not None
        backend.session().open_dataset(backend.spec())
        reporter = FetchReporter(backend.options)
        reporter.add(0.1, 8)
        reporter.flush()
        child = os.fork()
        if child == 0:
            try:
                reporter.add(0.2, 16)
                reporter.flush()
                reporter.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        wait_until(lambda: num_samples(backend) == 24)
        reporter.close()
        backend.close()


def test_no_thread_outlives_its_report(tmp_path, monkeypatch):
    started: list[int] = []
    start = _thread.start_new_thread
    monkeypatch.setattr(_thread, "start_new_thread", lambda *call: started.append(start(*call)))
    reporter = FetchReporter(TransportOptions(daemon="embedded", cache_dir=tmp_path))
    reporter.add(0.1, 8)
    reporter.flush()
    monkeypatch.undo()
    assert len(started) == 1
    wait_until(lambda: started[0] not in sys._current_frames())


def test_a_process_forked_while_a_report_is_on_its_way_does_not_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: None)  # it never gets there
    reporter = FetchReporter(TransportOptions(daemon="embedded", cache_dir=tmp_path))
    reporter.add(0.1, 8)
    child = os.fork()
    if child == 0:
        os._exit(0 if reporter._sent.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not reporter._sent.is_set()
