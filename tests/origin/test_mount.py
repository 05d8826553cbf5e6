from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cacheloader.errors import OriginChanged, OriginDenied, OriginNotFound
from cacheloader.keys import ByteRange
from cacheloader.origin import mount as mount_module
from cacheloader.origin.mount import MountOrigin
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def run_python(code: str, argument: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", code, argument]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


@pytest.fixture
async def mount():
    origin = MountOrigin(max_threads=2)
    yield origin
    await origin.aclose()


async def test_a_plain_path_and_its_file_url_are_the_same_file(mount: MountOrigin, tmp_path: Path):
    (tmp_path / "x").write_bytes(b"12345")
    plain, url = await mount.stat(f"{tmp_path}/x"), await mount.stat(f"file://{tmp_path}/x")
    assert plain.version == url.version == f"{(tmp_path / 'x').stat().st_mtime_ns}-5"
    assert (plain.uri, url.uri) == (f"{tmp_path}/x", f"file://{tmp_path}/x")


async def test_a_change_of_time_alone_is_a_change(mount: MountOrigin, tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    info = await mount.stat(str(path))
    os.utime(path, ns=(1, 1))
    with pytest.raises(OriginChanged, match=r"is now version 1-5 and the manifest names \d+-5"):
        await mount.read_range(str(path), ByteRange(start=0, stop=5), version=info.version)


async def test_links_are_followed_and_loops_end(mount: MountOrigin, tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "linked").symlink_to(tmp_path / "data")
    (tmp_path / "view" / "loop").symlink_to(tmp_path / "view")
    (tmp_path / "view" / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "view" / "file").symlink_to(tmp_path / "data" / "x")
    os.mkfifo(tmp_path / "view" / "pipe")
    found = sorted([info.uri async for info in mount.list(f"{tmp_path}/view/")])
    assert found == [f"{tmp_path}/view/file", f"{tmp_path}/view/linked/x"]


async def test_a_directory_is_no_object(mount: MountOrigin, tmp_path: Path):
    with pytest.raises(OriginNotFound, match="it is a directory"):
        await mount.stat(str(tmp_path))
    with pytest.raises(OriginNotFound):
        await mount.read_range(str(tmp_path), ByteRange(start=0, stop=1), version="")


async def test_a_name_with_a_null_byte_is_not_found(mount: MountOrigin):
    with pytest.raises(OriginNotFound):
        await mount.stat("/a\0b")


def test_a_file_without_read_permission_is_denied_and_the_way_out_is_named(tmp_path: Path):
    """Asked by a process that may not read everything, as root else may."""
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0)
    code = (
        "import asyncio, sys; from cacheloader.origin.mount import MountOrigin\n"
        "from cacheloader.keys import ByteRange\n"
        "try: asyncio.run(MountOrigin().read_range(sys.argv[1], ByteRange(start=0, stop=1), version=''))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    without = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    done = run_python(code, str(path), without)
    assert done.stdout.startswith(OriginDenied.__name__), done
    assert "permission denied; give the user that runs the daemon the right to read it" in done.stdout


async def test_a_hung_mount_is_given_up_at_the_callers_deadline(
    mount: MountOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pipe without a writer blocks whoever opens it, as a dead server does."""
    os.mkfifo(tmp_path / "hung")
    opens, opened = threading.Event(), mount_module._opened

    def told(*args: Any) -> int:
        opens.set()
        return opened(*args)

    monkeypatch.setattr(mount_module, "_opened", told)
    reading = asyncio.ensure_future(mount.read_range(f"{tmp_path}/hung", ByteRange(start=0, stop=1), version=""))
    await until(opens.is_set)  # a call that is given up before it begins is not made, and nothing would hang
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await reading
    # Nobody has opened the other end: what ended the call is the deadline alone.
    (tmp_path / "x").write_bytes(b"1")
    assert (await mount.stat(f"{tmp_path}/x")).size_bytes == 1, "the other thread still works"
    os.close(os.open(tmp_path / "hung", os.O_WRONLY))


def test_a_hung_mount_does_not_keep_the_process_alive(tmp_path: Path):
    os.mkfifo(tmp_path / "hung")
    code = (
        "import asyncio, sys; from cacheloader.origin.mount import MountOrigin\n"
        "from cacheloader.keys import ByteRange\n"
        "async def main():\n"
        "    origin = MountOrigin()\n"
        "    try:\n"
        "        async with asyncio.timeout(0.2):\n"
        "            await origin.read_range(sys.argv[1], ByteRange(start=0, stop=1), version='')\n"
        "    except TimeoutError: print('gave up')\n"
        "    await origin.aclose()\n"
        "asyncio.run(main())\n"
    )
    done = run_python(code, str(tmp_path / "hung"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "gave up\n", "")
