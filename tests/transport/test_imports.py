"""The client side of a training process stays light: no engine, no event loop, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

CLIENT = [
    "base", "control", "daemon", "direct", "embedded", "endpoint", "helper", "inheritance", "launch_lock", "lease",
    "leasing", "link", "open", "opening", "process", "resilient", "runtime_folder", "statistics",
]  # fmt: skip
HEAVY = {"torch", "obstore", "fsspec", "s3fs", "aiobotocore", "aiohttp", "aiofiles", "asyncio", "uvloop", "lmdb"}

_PROBE = """
import json, sys, time
import numpy, msgspec
began = time.process_time()
for name in sys.argv[1:]:
    __import__("cacheloader.transport." + name)
print(json.dumps([time.process_time() - began, sorted(sys.modules)]))
"""


def probe(*names: str) -> tuple[float, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *names], check=True, capture_output=True, text=True, timeout=60
    )
    cpu_s, modules = json.loads(done.stdout)
    return cpu_s, set(modules)


def test_client_modules_load_no_engine_no_event_loop_and_no_torch():
    _, modules = probe(*CLIENT)
    assert not HEAVY & modules
    assert "cacheloader_daemon" not in modules


def test_client_modules_load_quickly_beyond_numpy_and_msgspec():
    assert min(probe(*CLIENT)[0] for _ in range(3)) < 0.15


def test_variables_that_go_along_are_those_that_the_origins_look_at():
    from cacheloader.origin import environment
    from cacheloader.transport import opening

    assert set(opening._STORE_PREFIXES) == set(environment._PREFIXES)
