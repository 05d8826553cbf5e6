"""The daemon's options: every rule has a message that names the value and the way out."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
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
        ('cache_dir = "/c"\nallow_all_users = true\nprivate = true', "look_up_groups and tenants are for a shared"),
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


EXAMPLE = Path(__file__).parents[2] / "daemon" / "cacheloaderd.example.toml"


def test_the_example_is_a_configuration_and_names_every_option() -> None:
    config = from_file(EXAMPLE)
    vision, others = config.tenants
    assert vision.prefixes.cover("s3://vision/a.tar")
    assert vision.prefixes.folders == ("/mnt/lustre/vision",)
    assert not vision.prefixes.cover("s3://vision/private/a.tar")
    assert (vision.guaranteed_bytes, vision.max_bytes) == (600 * 2**30, 2**40)
    assert not others.uids
    text = EXAMPLE.read_text()
    named = set(re.findall(r"^#?([a-z_]+) = ", text, re.MULTILINE))
    # What a shared daemon has no use for.
    assert {field.name for field in fields(DaemonConfig)} - named == {"private", "idle_timeout_s", "tenants"}


def test_the_defaults_that_the_example_shows_are_those() -> None:
    lines = re.findall(r"^#([a-z_]+ = .*)$", EXAMPLE.read_text(), re.MULTILINE)
    assert len(lines) > 10
    shown = tomllib.loads("\n".join(lines))
    default = DaemonConfig(cache_dir=Path("/c"))
    del shown["cache_dirs"]  # made up from cache_dir
    for name, value in shown.items():
        assert getattr(default, name) == (tuple(value) if isinstance(value, list) else value), name


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "has no name; give it one"),
        ('name = "x"\ncolour = 1', "has the unknown option 'colour'; the options are"),
        ('name = "x"\nusers = ["nobody knows me"]', "names 'nobody knows me', and this system knows no such user"),
        ('name = "x"\ngroups = ["nobody knows me"]', "this system knows no such group"),
        ('name = "x"\nusers = [true]', "holds True, which is neither a name nor a number"),
        ('name = "x"\nallow = "s3://b/"', "is no list of URL prefixes"),
        ('name = "x"\nallow = ["s3://b/../c/"]', "may mean more than one place"),
        ('name = "x"\nmax_connections = -1', "max_connections=-1 is no number; 0 means no limit"),
        ('name = "x"\nmax_bandwidth = "lots"', "max_bandwidth='lots' is no size"),
        ('name = "x"\nguaranteed_size = "2GiB"\nmax_size = "1GiB"', "is below its guaranteed_size"),
        ('name = "x"\nguaranteed_size = "2GiB"', "which is more than cache_size='1GiB'"),
        ('name = "x"\n[[tenants]]\nname = "x"', "two tenants are named 'x'"),
    ],
)
def test_a_wrong_tenant_is_refused_by_name(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "cacheloaderd.toml"
    path.write_text(f'cache_dir = "/c"\ncache_size = "1GiB"\n[[tenants]]\n{table}\n')
    with pytest.raises(ConfigError, match=message):
        from_file(path)


def test_users_and_groups_may_be_named_or_numbered(tmp_path: Path) -> None:
    path = tmp_path / "cacheloaderd.toml"
    path.write_text('cache_dir = "/c"\n[[tenants]]\nname = "x"\nusers = ["root", 7]\ngroups = ["root"]\n')
    (tenant,) = from_file(path).tenants
    assert (tenant.uids, tenant.gids) == ({0, 7}, {0})


def test_eviction_is_by_plan_or_for_comparison_by_last_use(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text(f'cache_dir = "{tmp_path}"\neviction = "lru"\nhedge_share = 0.0\n')
    assert DaemonConfig.from_mapping(DaemonConfig.read(file), source=str(file)).eviction == "lru"
    assert DaemonConfig(cache_dir=tmp_path).eviction == "plan"
    with pytest.raises(ConfigError, match="eviction='fifo' is none of plan, lru"):
        DaemonConfig(cache_dir=tmp_path, eviction="fifo")
