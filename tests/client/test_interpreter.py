"""Where a fresh interpreter looks for modules."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cacheloader import interpreter
from cacheloader.errors import DaemonUnavailable

if TYPE_CHECKING:
    from pathlib import Path


def test_packages_are_no_part_of_the_search_path_since_they_would_hide_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    (packages / "toolbox").mkdir(parents=True)
    (packages / "toolbox" / "__init__.py").touch()
    (packages / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert str(packages) not in interpreter.search_path("toolbox.part").split(os.pathsep)


def test_a_module_is_found_from_anywhere_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    environment = os.environ | {"PYTHONPATH": interpreter.search_path("cacheloader_daemon")}
    command = [*interpreter.command("cacheloader_daemon"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=100)
    assert b"cacheloaderd" in done.stdout


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(DaemonUnavailable, match="the package no_such_package is not installed"):
        interpreter.search_path("no_such_package.part")
