"""The systemd units parse, and say what the daemon needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "daemon" / "systemd"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_units_have_no_key_that_systemd_does_not_know() -> None:
    units = sorted(str(unit) for unit in UNITS.glob("cacheloaderd.*"))
    assert len(units) == 2
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    # An unknown key is a warning with exit status 0.
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_the_socket_does_not_lie_in_a_directory_that_goes_with_the_service() -> None:
    assert "ListenSequentialPacket=/run/cacheloader/daemon.sock" in (UNITS / "cacheloaderd.socket").read_text()
    assert "RuntimeDirectory" not in (UNITS / "cacheloaderd.service").read_text()
