from __future__ import annotations

import errno
import gc
import os

import pytest

from cacheloader import fdpass
from cacheloader.transport.lease import FileLease

CONTENT = bytes(range(256)) * 40


def leased(content: bytes = CONTENT, *, size_bytes: int | None = None, on_release=None) -> FileLease:
    return FileLease(
        fd=fdpass.sealed_memory_file("test", content),
        size_bytes=len(content) if size_bytes is None else size_bytes,
        index=b"index",
        source="memory",
        uri="mem://a.tar",
        on_release=on_release,
    )


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_read_gives_exactly_the_range():
    lease = leased()
    assert lease.read(0, len(CONTENT)) == CONTENT
    assert lease.read(17, 300) == CONTENT[17:300]
    assert lease.read(5, 5) == b""
    assert lease.read(len(CONTENT), len(CONTENT)) == b""
    lease.release()


def test_many_ranges_are_read_at_once_in_any_order_and_more_than_once():
    lease = leased()
    starts, stops = [300, 0, 5, 0, len(CONTENT)], [417, 3, 5, 3, len(CONTENT)]
    assert lease.read_each(starts, stops) == [CONTENT[a:b] for a, b in zip(starts, stops, strict=True)]
    assert lease.read_each([], []) == []
    lease.release()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, len(CONTENT) + 1)])
def test_range_outside_the_shard_is_an_error_that_names_it(start, stop):
    lease = leased()
    with pytest.raises(OSError, match=r"mem://a\.tar") as caught:
        lease.read(start, stop)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match=rf"mem://a\.tar.*\[{start}, {stop}\)") as caught:
        lease.read_each([0, start], [9, stop])
    assert caught.value.errno == errno.EINVAL
    lease.release()


def test_file_that_ends_early_is_an_error_that_names_shard_and_place():
    lease = leased(b"abc", size_bytes=10)
    with pytest.raises(OSError, match=r"mem://a\.tar.*ends at byte 3") as caught:
        lease.read(1, 9)
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match=r"mem://a\.tar.*ends at byte 3") as caught:
        lease.read_each([0, 1], [2, 9])
    assert caught.value.errno == errno.EIO
    lease.release()


def test_reads_that_the_kernel_cuts_are_put_together(monkeypatch):
    lease = leased()
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, min(n, 7), at))
    assert lease.read(3, 100) == CONTENT[3:100]
    assert lease.read_each([3, 0], [100, 5]) == [CONTENT[3:100], CONTENT[:5]]
    lease.release()


def test_disk_failure_names_the_shard(monkeypatch):
    lease = leased()

    def fail(fd, n, at):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match=r"mem://a\.tar.*Input/output error") as caught:
        lease.read(0, 10)
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match=r"mem://a\.tar.*Input/output error"):
        lease.read_each([0], [10])
    lease.release()


def test_a_lease_given_back_while_many_ranges_are_read_hands_out_nothing_of_what_its_descriptor_becomes(monkeypatch):
    lease = leased()
    other = fdpass.sealed_memory_file("other", b"x" * len(CONTENT))
    real = os.pread

    def released_meanwhile(fd, n, at):
        if lease.fileno() == fd:
            lease.release()
            os.dup2(other, fd)  # as the next file that the process opens may be
        return real(fd, n, at)

    fd = lease.fileno()
    monkeypatch.setattr(os, "pread", released_meanwhile)
    with pytest.raises(OSError, match="released"):
        lease.read_each([0, 9], [9, 20])
    os.close(fd)
    os.close(other)


def test_release_closes_once_and_tells_once():
    told = []
    lease = leased(on_release=lambda: told.append(1))
    fd = lease.fileno()
    lease.release()
    lease.release()
    assert told == [1]
    assert not is_open(fd)
    with pytest.raises(OSError, match="released"):
        lease.read(0, 1)
    with pytest.raises(OSError, match="released"):
        lease.read_each([0], [1])


def test_lease_that_nobody_holds_any_more_is_given_back():
    told = []
    lease = leased(on_release=lambda: told.append(1))
    fd = lease.fileno()
    del lease
    gc.collect()
    assert told == [1]
    assert not is_open(fd)


def test_forked_child_closes_its_copy_and_tells_nobody():
    reader, writer = os.pipe()
    lease = leased(on_release=lambda: os.write(writer, b"told"))
    fd = lease.fileno()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not is_open(fd)
            lease.release()
            with pytest.raises(OSError, match="forked"):
                lease.read(0, 1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lease.read(0, 3) == CONTENT[:3]
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 4)
    lease.release()
    assert os.read(reader, 4) == b"told"
    os.close(reader)
    os.close(writer)
