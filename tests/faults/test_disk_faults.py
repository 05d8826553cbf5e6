"""A real daemon whose disks fail: every reader gets right bytes in time, and the status says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemon.store.disks import flip_bit
from tests.support.disk_fault import CHANGES, DiskFault
from tests.support.node_daemon import NodeDaemon, held_still
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.raw_client import RawClient
    from tests.support.shard_sets import ShardSet

    Daemons = Callable[..., NodeDaemon]


@pytest.fixture
def fault(tmp_path: Path) -> DiskFault:
    return DiskFault.build(tmp_path, tmp_path / "cache")


def read_all(client: RawClient, shards: ShardSet) -> list[str]:
    """Read every shard and compare it; where each came from."""
    sources = []
    for shard, path in enumerate(shards.paths):
        lease = client.acquire(shard)
        assert lease.read() == path.read_bytes()
        sources.append(lease.leased.source)
        lease.close()
        client.release(shard)
    return sources


def status_of(client: RawClient) -> dict[str, Any]:
    return json.loads(client.status())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_whichever_call_fails_every_shard_is_right_and_the_status_says_why(
    daemons: Daemons, shards: ShardSet, fault: DiskFault, number: int
) -> None:
    """Fault: each step of a download fails in turn. Promise: right bytes, no wait, nothing left behind, named."""
    daemon = daemons(environment=fault.environment).start()
    with daemon.connect() as client:
        for turn, call in enumerate(("create", "pwrite", "fallocate", "rename", "mkdir")):
            with fault.failing(number, call):
                if turn == 0:
                    client.open_dataset([shards.folder])
                assert set(read_all(client, shards)) == {"memory"}, call
                status = status_of(client)
                assert "disk" in status["degraded"]
                assert [path for path in daemon.directory.glob("blobs/*/*") if path.is_file()] == []
        assert [one["condition"] for one in status["directories"]] == ["well" if number == errno.ENOSPC else "failing"]
    assert daemon.stop() == 0
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        assert "memory" not in read_all(client, shards)


def test_a_disk_that_turns_read_only_keeps_serving_what_it_holds(
    daemons: Daemons, shards: ShardSet, fault: DiskFault
) -> None:
    """Fault: EROFS at run time. Promise: what is there is served from there, the rest from memory; named in status."""
    daemon = daemons(environment=fault.environment).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        with fault.failing(errno.EROFS, *CHANGES):
            for path in daemon.blobs[:4]:
                path.unlink()
            for _ in range(2):
                assert sorted(read_all(client, shards)) == ["memory"] * 4 + ["nvme"] * 4
            [directory] = status_of(client)["directories"]
            assert directory["condition"] == "read-only"
            assert "Read-only file system" in directory["cause"]


def test_blobs_that_cannot_be_read_are_fetched_again(daemons: Daemons, shards: ShardSet, fault: DiskFault) -> None:
    """Fault: EIO when a suspect is verified. Promise: it is set aside and fetched again; a client sees right bytes."""
    daemon = daemons(environment=fault.environment, arguments=["--config", str(verifying(fault.control.parent))])
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        with fault.failing(errno.EIO, "pread"):
            lease = client.acquire(0)
            assert lease.read() == shards.paths[0].read_bytes()
            lease.close()
        [directory] = status_of(client)["directories"]
        assert directory["store"]["damaged"] >= 1


def verifying(folder: Path) -> Path:
    path = folder / "daemon.toml"
    path.write_text("verify_on_lease = true\n")
    return path


def test_a_flipped_bit_is_never_served_when_leases_are_verified(
    daemons: Daemons, shards: ShardSet, tmp_path: Path
) -> None:
    daemon = daemons(arguments=["--config", str(verifying(tmp_path))]).start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        for path in daemon.blobs:
            flip_bit(path)
        read_all(client, shards)
        [directory] = status_of(client)["directories"]
        assert directory["store"]["damaged"] == 8
        assert directory["store"]["quarantined_blobs"] == 4
        assert read_all(client, shards) == ["nvme"] * 8


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[NodeDaemon, list[Path]]]:
    """A shared daemon with two cache directories, stopped."""
    directories = [tmp_path / "one" / "cache", tmp_path / "two" / "cache"]
    for path in directories:
        path.parent.mkdir()
    config = tmp_path / "daemon.toml"
    config.write_text("allow_local_paths = true\nscrub_interval_s = 0.5\n")
    daemon = NodeDaemon(
        directory=directories[0],
        private=False,
        arguments=["--cache-dir", str(directories[1]), "--config", str(config)],
    )
    yield daemon, directories
    daemon.kill()


def test_a_cache_directory_that_vanishes_under_a_daemon_costs_its_shards_a_fetch(
    two: tuple[NodeDaemon, list[Path]], shards: ShardSet
) -> None:
    """Fault: ``rm -rf`` of one NVMe's directory at run time. Promise: the other one goes on and takes its shards."""
    daemon, directories = two
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        held = client.acquire(0)
        # Which of them a shard goes to depends on what is free on them at the moment.
        assert all(list(path.glob("blobs/*/*.data")) for path in directories)
        with held_still(daemon.pid):  # which may make a file in a folder that was just emptied
            shutil.rmtree(directories[1])
        read_all(client, shards)
        assert read_all(client, shards) == ["nvme"] * 8
        assert len(list(directories[0].glob("blobs/*/*.data"))) == 8
        status = status_of(client)
        assert [one["condition"] for one in status["directories"]] == ["well", "gone"]
        assert "disk" in status["degraded"]
        assert held.read() == shards.paths[0].read_bytes()
        held.close()
    assert daemon.stop() == 0


def test_the_scrub_of_a_daemon_finds_damage_that_nobody_reads(
    two: tuple[NodeDaemon, list[Path]], shards: ShardSet
) -> None:
    """Fault: a flipped bit at rest. Promise: found by the scrub alone, set aside, and fetched again when asked for."""
    daemon, directories = two
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        [path, *_] = directories[1].glob("blobs/*/*.data")
        flip_bit(path)
        wait_until(lambda: status_of(client)["directories"][1]["store"]["quarantined_blobs"] == 1, timeout_s=60)
        wait_until(lambda: status_of(client)["plan"]["resident_shards"] == 7)
        assert status_of(client)["plan"]["lost_blobs"] == 1
        assert sorted(read_all(client, shards)) == ["nvme"] * 7 + ["origin"]
    assert daemon.stop() == 0


def test_the_index_may_vanish_under_a_daemon(daemons: Daemons, shards: ShardSet) -> None:
    """Fault: ``data.mdb`` is deleted at run time. Promise: nobody notices; the next start rebuilds it from names."""
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
        for path in (daemon.directory / "lmdb").iterdir():
            path.unlink()
        assert read_all(client, shards) == ["nvme"] * 8
    assert daemon.stop() == 0
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        assert read_all(client, shards) == ["nvme"] * 8


def test_an_index_cut_short_under_a_daemon_costs_a_restart_at_most(daemons: Daemons, shards: ShardSet) -> None:
    """Fault: ``data.mdb`` is truncated while it is mapped. Promise: no wrong shard, and the next start is whole."""
    daemon = daemons().start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        read_all(client, shards)
    os.truncate(daemon.directory / "lmdb" / "data.mdb", 4096)
    daemon.kill()
    daemon.start()
    with daemon.connect() as client:
        client.open_dataset([shards.folder])
        assert read_all(client, shards) == ["nvme"] * 8


def test_a_small_quota_on_a_disk_that_others_fill_is_kept_below_the_floor(tmp_path: Path, shards: ShardSet) -> None:
    """Fault: others fill the disk while the cache is full. Promise: shards are evicted until the floor is free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("mounting is not permitted here")
    config = tmp_path / "daemon.toml"
    config.write_text('min_free_size = "8MiB"\n')
    daemon = NodeDaemon(directory=disk / "cache", cache_size="8MiB", arguments=["--config", str(config)])
    try:
        daemon.start()
        with daemon.connect() as client:
            client.open_dataset([shards.folder])
            read_all(client, shards)
            before = status_of(client)["plan"]["resident_shards"]
            with (disk / "other").open("wb") as other:
                found = os.fstatvfs(other.fileno())
                os.posix_fallocate(other.fileno(), 0, found.f_bavail * found.f_frsize - 7 * 2**20)

            def has_given_way() -> bool:
                read_all(client, shards)
                plan = status_of(client)["plan"]
                return plan["resident_shards"] < before and plan["quota_bytes"] < 8 * 2**20

            wait_until(has_given_way, timeout_s=100)
            assert "space" in status_of(client)["degraded"]
        assert daemon.stop() == 0
    finally:
        daemon.kill()
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=30)
