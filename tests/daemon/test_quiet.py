"""A daemon that gives way: processor, disk and page cache are the job's."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cacheloader_daemon.priority import Priority

from cacheloader.errors import ConfigError
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_daemon import NodeDaemon
    from tests.support.shard_sets import ShardSet

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def pages_in_memory(path: Path) -> int:
    """Of a file; asked of the kernel without touching one."""
    size_bytes = path.stat().st_size
    num_pages = -(-size_bytes // mmap.PAGESIZE)
    fd = os.open(path, os.O_RDONLY)
    address = _library.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    marks = ctypes.create_string_buffer(num_pages)
    try:
        assert _library.mincore(address, size_bytes, marks) == 0
    finally:
        _library.munmap(address, size_bytes)
    return sum(mark & 1 for mark in marks.raw)


@pytest.mark.parametrize("drops", [True, False])
def test_pages_of_a_shard_leave_memory_when_its_last_reader_is_done_if_that_is_wanted(
    daemons: Callable[..., NodeDaemon], shards: ShardSet, tmp_path: Path, drops: bool
) -> None:
    config = tmp_path / "cacheloaderd.toml"
    config.write_text(f"drop_behind = {str(drops).lower()}\n")
    daemon = daemons(arguments=["--config", str(config)]).start()
    with daemon.connect() as one, daemon.connect() as other:
        one.open_dataset([shards.paths[0]])
        other.open_dataset([shards.paths[0]])
        leases = [one.acquire(0), other.acquire(0)]
        for lease in leases:
            assert lease.read() == shards.paths[0].read_bytes()
            lease.close()
        (blob,) = daemon.blobs
        one.release(0)
        daemon.status()
        assert pages_in_memory(blob) > 0, "somebody reads it still"
        other.release(0)
        if drops:
            wait_until(lambda: pages_in_memory(blob) == 0)
        else:
            daemon.status()
            assert pages_in_memory(blob) > 0
        one.acquire(0).close()  # it is there as before
    assert daemon.stop() == 0


def test_the_daemon_and_its_workers_have_the_priority_that_was_asked_for(
    daemons: Callable[..., NodeDaemon], shards: ShardSet
) -> None:
    cpu = min(os.sched_getaffinity(0))
    daemon = daemons(arguments=["--nice", "5", "--io-class", "idle", "--cpus", f"{cpu}"]).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for pid in (daemon.pid, *daemon.children):
            assert os.getpriority(os.PRIO_PROCESS, pid) >= min(19, own + 5)
            assert os.sched_getaffinity(pid) == {cpu}
            for thread in Path(f"/proc/{pid}/task").iterdir():
                # 3 << 13 is the idle class; the number of ioprio_get is one above that of ioprio_set.
                got = _library.syscall({"x86_64": 252, "aarch64": 31}[os.uname().machine], 1, int(thread.name))
                assert got >> 13 == 3 or not thread.exists(), thread
    assert daemon.children, "the workers were looked at"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nice": 20}, "nice=20 is not between 0 and 19"),
        ({"io_class": "realtime"}, "io_class='realtime' is none of"),
        ({"cpus": "1-"}, "cpus='1-' is no list of processors"),
        ({"cpus": "3-1"}, "cpus='3-1' is no list of processors"),
        ({"cpus": "all"}, "cpus='all' is no list of processors"),
    ],
)
def test_a_priority_that_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Priority.parse(**{"nice": 0, "io_class": "", "cpus": "", **options})  # type: ignore[arg-type]


def test_processors_are_named_as_ranges() -> None:
    assert Priority.parse(nice=0, io_class="", cpus="0-2, 5").cpus == {0, 1, 2, 5}


def test_processors_that_this_process_may_not_use_are_refused_with_those_that_it_may() -> None:
    with pytest.raises(ConfigError, match=r"cpus=65000 has none of the processors that this process may use"):
        Priority(cpus=frozenset({65000})).take()
