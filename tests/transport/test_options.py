from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

from cacheloader.config import TransportOptions, default_cache_dir
from cacheloader.errors import ConfigError


def test_nothing_given_means_a_private_daemon_in_the_users_cache(tmp_path):
    options = TransportOptions()
    assert options.daemon == "embedded"
    assert options.socket_path is None
    assert options.directory == tmp_path / ".cache" / "cacheloader"
    assert options.cache_size_bytes is None


def test_environment_is_read_where_nothing_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("CACHELOADER_DAEMON", "unix:///run/x.sock")
    monkeypatch.setenv("CACHELOADER_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("CACHELOADER_CACHE_SIZE", "3GiB")
    options = TransportOptions()
    assert options.socket_path == Path("/run/x.sock")
    assert options.directory == tmp_path / "c"
    assert options.cache_size_bytes == 3 * 2**30


def test_arguments_win_over_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CACHELOADER_DAEMON", "unix:///run/x.sock")
    monkeypatch.setenv("CACHELOADER_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("CACHELOADER_CACHE_SIZE", "3GiB")
    options = TransportOptions(daemon="none", cache_dir=tmp_path, cache_size=5)
    assert (options.daemon, options.directory, options.cache_size_bytes) == ("none", tmp_path, 5)


def test_directory_is_absolute_whatever_the_process_does_later(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert TransportOptions(cache_dir="c").directory == tmp_path / "c"
    assert TransportOptions(cache_dir="~/c").directory == tmp_path / "c"
    monkeypatch.setenv("CACHELOADER_CACHE_DIR", "d")
    assert default_cache_dir() == tmp_path / "d"


def test_cache_home_of_the_desktop_specification_is_used_if_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/cacheloader")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / ".cache" / "cacheloader"


@pytest.mark.parametrize("daemon", ["", "tcp://host:1", "unix://relative", "/run/x.sock", "None"])
def test_text_that_names_no_daemon_is_refused_with_the_ways_to_write_it(daemon):
    with pytest.raises(ConfigError, match=r'daemon=.*"unix:///absolute/path".*"none"'):
        TransportOptions(daemon=daemon)


def test_wrong_variable_is_named_in_the_error(monkeypatch):
    monkeypatch.setenv("CACHELOADER_DAEMON", "yes")
    with pytest.raises(ConfigError, match="CACHELOADER_DAEMON='yes'"):
        TransportOptions()
    monkeypatch.setenv("CACHELOADER_DAEMON", "none")
    monkeypatch.setenv("CACHELOADER_CACHE_SIZE", "much")
    with pytest.raises(ConfigError, match="CACHELOADER_CACHE_SIZE='much'"):
        TransportOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_size", 0),
        ("cache_size", "-1"),
        ("timeout_s", 0),
        ("timeout_s", -1),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("hello_timeout_s", 0),
        ("launch_timeout_s", 0),
        ("idle_timeout_s", 0),
        ("fallback_after_s", -1),
        ("direct_memory", "x"),
    ],
)
def test_value_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        TransportOptions(**{name: value})


def test_cache_of_ones_own_beside_a_shared_daemon_is_a_warning(caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        TransportOptions(daemon="unix:///run/x.sock", cache_dir=tmp_path)
    assert "has no effect" in caplog.text or "have no effect" in caplog.text


def test_record_is_small_and_equal_in_another_process(monkeypatch, tmp_path):
    options = TransportOptions(cache_dir=tmp_path, cache_size="1GiB", timeout_s=7)
    pickled = pickle.dumps(options)
    assert len(pickled) < 600
    monkeypatch.setenv("CACHELOADER_DAEMON", "none")  # what holds was settled where the user wrote it
    assert pickle.loads(pickled) == options


def test_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="CACHELOADER_CACHE_DIR"):
        TransportOptions()
    assert TransportOptions(daemon="unix:///run/x.sock").directory.is_absolute()
