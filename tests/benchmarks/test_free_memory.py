from __future__ import annotations

import os

from benchmarks.harness import free_memory


def test_memory_is_taken_by_another_process_and_never_more_than_half_of_what_there_is(monkeypatch):
    mib = 2**20
    assert free_memory.available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_memory.back(8 * mib) == 8 * mib
    monkeypatch.setattr(free_memory, "available_bytes", lambda: 6 * mib)
    assert free_memory.back() == 3 * mib
