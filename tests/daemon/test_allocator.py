"""Memory of bodies that come and go."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import resource
from cacheloader_daemon import allocator

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        body = bytearray(b"x") * (8 * 2**20)
        del body
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

allocator.reuse_freed_memory()
faults(1)
print(faults(20))
"""


def test_the_memory_of_a_freed_body_serves_the_next_one() -> None:
    """Fresh pages for each of twenty bodies would be 40,960 faults."""
    output = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert int(output.stdout) < 5000
