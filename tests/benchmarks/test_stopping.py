"""A SIGTERM ends a benchmark by ``SystemExit``, whatever the code it finds makes of that."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from benchmarks.harness.stopping import Stop


@pytest.fixture
def stop():
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop()
    stop.listen()
    yield stop
    signal.signal(signal.SIGTERM, before)


def terminate_this():
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_leaves_as_a_shell_tells_signals(stop):
    with pytest.raises(SystemExit) as left, stop:
        terminate_this()
    assert left.value.code == 143


def test_code_that_fails_on_its_way_out_does_not_put_its_own_error_in_place(stop):
    def fails():
        try:
            terminate_this()
        finally:
            raise BufferError("cannot close exported pointers exist")

    with pytest.raises(SystemExit) as left, stop:
        fails()
    assert left.value.code == 143


def test_code_that_swallows_it_is_left_at_the_next_check(stop):
    with contextlib.suppress(SystemExit):
        terminate_this()
    with pytest.raises(SystemExit) as left:
        stop.check()
    assert left.value.code == 143


def test_an_error_of_its_own_stays_what_it_is(stop):
    with pytest.raises(ValueError, match="own"), stop:
        raise ValueError("own")
