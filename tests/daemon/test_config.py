"""The daemon's options: every rule has a message that names the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from cacheloader_daemon.config import DaemonConfig

from cacheloader.errors import ConfigError


def from_file(path: Path) -> DaemonConfig:
    """As ``cacheloaderd --config`` reads it."""
    return DaemonConfig.from_mapping(DaemonConfig.read(path), source=str(path))


def test_a_file_with_every_option_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cacheloaderd.toml"
    path.write_text(
        """
        cache_dir = "/nvme/cache"
        cache_size = "1.5TiB"
        socket = "/run/cacheloader/daemon.sock"
        private = false
        idle_timeout_s = 0
        metrics_port = 9464
        allowed_uids = [1000, 1001]
        allowed_gids = [2000]
        socket_mode = 0o666
        max_connections = 100
        max_requests = 10
        max_fetches = 4
        max_range_requests = 8
        range_size = "16MiB"
        prepare_processes = 1
        nice = 5
        log_level = "WARNING"
        """
    )
    config = from_file(path)
    assert config.cache_dir == Path("/nvme/cache")
    assert config.socket_path == Path("/run/cacheloader/daemon.sock")
    assert config.allowed_uids == (1000, 1001)
    assert config.range_bytes == 16 * 2**20
    assert config.socket_mode == 0o666


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no cache_dir"),
        ("cache_dir = ", "is no TOML"),
        ('cache_dir = "/c"\ncahce_size = 1', "unknown option 'cahce_size'; the options are allow_all_users, "),
        ('cache_dir = "/c"\ncache_size = "lots"', "cache_size='lots' is no size"),
        ('cache_dir = "/c"\ncache_size = 0', "cache_size=0 leaves no room"),
        ('cache_dir = "/c"\ncache_size = true', "cache_size=True is no int or str"),
        ('cache_dir = "/c"\nmetrics_port = "80"', "metrics_port='80' is no int"),
        ('cache_dir = "/c"\nmetrics_port = 70000', "metrics_port=70000 is not between 0 and 65535"),
        ('cache_dir = "/c"\nprivate = 1', "private=1 is no bool"),
        ('cache_dir = "/c"\nallowed_uids = ["me"]', r"allowed_uids=\['me'\] is no list of numbers"),
        ('cache_dir = "/c"\nallowed_uids = [1]\nprivate = true', "are for a shared daemon"),
        ('cache_dir = "/c"\nallow_all_users = true\nprivate = true', "allow_all_users and tenants are for a shared"),
        ('cache_dir = "/c"\nallowed_schemes = "hf"', "allowed_schemes='hf' is no list"),
        ('cache_dir = "/c"\nallowed_schemes = ["hf://"]', "is no list of schemes such as"),
        ('cache_dir = "/c"\nidle_timeout_s = -1', "idle_timeout_s=-1 is no number of seconds"),
        ('cache_dir = "/c"\nidle_timeout_s = nan', "idle_timeout_s=nan is no number of seconds"),
        ('cache_dir = "/c"\nrange_size = 100', "range_size=100 is below 64KiB"),
        ('cache_dir = "/c"\nmax_memory_size = "lots"', "max_memory_size='lots' is no size"),
        ('cache_dir = "/c"\nlog_level = "LOUD"', "log_level='LOUD' is none of"),
    ],
)
def test_a_wrong_option_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cacheloaderd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_file(path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read: No such file"):
        from_file(tmp_path / "missing.toml")


def test_a_private_daemon_leaves_when_idle_and_a_shared_one_does_not() -> None:
    assert DaemonConfig(cache_dir=Path("/c"), private=True).idle_exit_s == 60.0
    assert DaemonConfig(cache_dir=Path("/c")).idle_exit_s == 0.0
    assert DaemonConfig(cache_dir=Path("/c"), idle_timeout_s=5).idle_exit_s == 5.0


def test_the_socket_lies_in_the_cache_directory_unless_told_otherwise() -> None:
    assert DaemonConfig(cache_dir=Path("/c")).socket_path == Path("/c/daemon.sock")
