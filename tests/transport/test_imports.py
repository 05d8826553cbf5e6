"""The client side of a training process stays light: no engine, no event loop, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CLIENT = [
    "base", "control", "daemon", "direct", "embedded", "endpoint", "helper", "inheritance", "launch_lock", "lease",
    "leasing", "link", "open", "opening", "process", "resilient", "runtime_folder", "statistics",
]  # fmt: skip
HEAVY = {"torch", "obstore", "fsspec", "s3fs", "aiobotocore", "aiohttp", "aiofiles", "asyncio", "uvloop", "lmdb"}

_PROBE = """
import json, sys, time
began = time.process_time()
import numpy, msgspec
needed_s = time.process_time() - began
for name in sys.argv[1:]:
    __import__("cacheloader.transport." + name)
own_s = time.process_time() - began - needed_s
print(json.dumps([own_s / needed_s, sorted(sys.modules)]))
"""


def probe(*names: str) -> tuple[float, set[str]]:
    """The processor time of these modules, with that of numpy and msgspec as the unit, and what is loaded."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *names], check=True, capture_output=True, text=True, timeout=100
    )
    share, modules = json.loads(done.stdout)
    return share, set(modules)


def test_client_modules_load_no_engine_no_event_loop_and_no_torch():
    _, modules = probe(*CLIENT)
    assert not HEAVY & modules
    assert "cacheloader_daemon" not in modules


@pytest.mark.timeout(600)
def test_client_modules_load_quickly_beside_numpy_and_msgspec():
    assert any(probe(*CLIENT)[0] < 2 for _ in range(5))


def test_variables_that_go_along_are_those_that_the_origins_look_at():
    from cacheloader.origin import environment
    from cacheloader.transport import opening

    assert set(opening._STORE_PREFIXES) == set(environment._PREFIXES)
