"""Keys that end in the middle of a job: a store refuses them after some requests, and the usual chain has others."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from cacheloader.errors import OriginDenied
from cacheloader.keys import ByteRange
from cacheloader.origin import aws_credentials
from cacheloader.origin.open import open_origin
from tests.support.counting_proxy import Fault
from tests.support.expiring_proxy import ExpiringProxy
from tests.support.seaweedfs import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheloader.origin.base import Origin
    from tests.support.seaweedfs import SeaweedServer

FIRST, SECOND, THIRD = KEYS
WHOLE = ByteRange(start=0, stop=4)
BOTH_ENGINES = pytest.mark.parametrize("engine", ["obstore", "fsspec"])


@pytest.fixture
def proxy(s3_server: SeaweedServer) -> Iterator[ExpiringProxy]:
    proxy = ExpiringProxy(s3_server.port)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def uri(s3: Any, bucket: str, prefix: str) -> str:
    for name in ("object", "other"):
        s3.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=b"body")
    return f"s3://{bucket}/{prefix}object"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without credentials, whose instance has none either.

    The chain may take its time, as processes do on a busy machine, and rests for longer than any test takes.
    """
    for name, seconds in (("DEADLINE_S", 60.0), ("_LEAST_REST_S", 3600.0), ("_REST_S", 3600.0)):
        monkeypatch.setattr(aws_credentials, name, seconds)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    monkeypatch.setattr(
        os, "environ", {**kept, "HOME": str(tmp_path), "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}
    )
    (tmp_path / ".aws").mkdir()
    return tmp_path


def write_file(home: Path, key: str) -> None:
    (home / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {KEYS[key]}\n"
    )


def write_program(home: Path, keys: list[str]) -> Path:
    """A credential process that gives the next of ``keys`` each time, the last again and again, for an hour each."""
    counter, program = home / "calls", home / "program.py"
    expires = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    answers = [
        json.dumps({"Version": 1, "AccessKeyId": key, "SecretAccessKey": KEYS[key], "Expiration": expires})
        for key in keys
    ]
    program.write_text(
        f"calls = open({str(counter)!r}, 'a+')\ncalls.write('x')\ncalls.seek(0)\nanswers = {answers!r}\n"
        "print(answers[min(len(calls.read()), len(answers)) - 1])\n"
    )
    (home / ".aws" / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    return counter


def opened(uri: str, proxy: ExpiringProxy, engine: str, **options: object) -> Origin:
    return open_origin(uri, storage_options=options, environment={"AWS_ENDPOINT_URL": proxy.url}, engine=engine)


async def read(origin: Origin, uri: str) -> bytes:
    return bytes(await origin.read_range(uri, WHOLE, version=""))


@pytest.mark.parametrize(("engine", "status"), [("obstore", 400), ("obstore", 403), ("fsspec", 400)])
async def test_keys_of_a_file_that_ended_are_read_anew_and_the_request_is_made_again(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str, status: int
) -> None:
    proxy.refusal = Fault(action="status", status=status, code="ExpiredToken")
    write_file(home, FIRST)
    origin = opened(uri, proxy, engine)
    proxy.requests_left[FIRST] = 2
    assert [await read(origin, uri) for _ in range(2)] == [b"body"] * 2
    write_file(home, SECOND)
    assert [await read(origin, uri) for _ in range(2)] == [b"body"] * 2
    assert (proxy.refused, proxy.seen[SECOND]) == ({FIRST: 1}, 2)
    await origin.aclose()


@BOTH_ENGINES
async def test_a_program_is_asked_again_before_its_own_time_is_over_where_the_store_says_so(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    counter = write_program(home, [FIRST, SECOND])
    proxy.requests_left[FIRST] = 1
    origin = opened(uri, proxy, engine)
    for _ in range(3):
        assert await read(origin, uri) == b"body"
    assert counter.read_text() == "xx"
    await origin.aclose()


@BOTH_ENGINES
async def test_many_requests_that_are_refused_at_once_ask_the_chain_once(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    counter = write_program(home, [FIRST, SECOND])
    proxy.requests_left[FIRST] = 0
    proxy.latency_s = 0.2
    origin = opened(uri, proxy, engine)
    assert await asyncio.gather(*(read(origin, uri) for _ in range(8))) == [b"body"] * 8
    assert counter.read_text() == "xx"
    await origin.aclose()


@BOTH_ENGINES
async def test_a_description_and_a_listing_are_made_again_too_although_a_head_is_refused_without_a_word(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    write_program(home, [FIRST, SECOND])
    proxy.requests_left[FIRST] = 0
    origin = opened(uri, proxy, engine)
    assert (await origin.stat(uri)).size_bytes == 4
    await origin.aclose()
    (home / "calls").unlink()
    origin = opened(uri, proxy, engine)
    folder = uri.rpartition("/")[0] + "/"
    assert sorted([info.uri async for info in origin.list(folder)]) == [uri, f"{folder}other"]
    await origin.aclose()


@BOTH_ENGINES
async def test_a_chain_that_gives_the_same_keys_again_is_an_error_that_says_what_to_do_and_no_loop(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    counter = write_program(home, [FIRST])
    proxy.requests_left[FIRST] = 0
    origin = opened(uri, proxy, engine)
    for _ in range(5):
        with pytest.raises(OriginDenied, match=r"400 ExpiredToken .*chain was asked again and gives no others: renew"):
            await read(origin, uri)
    assert counter.read_text() == "xx"
    assert proxy.refused[FIRST] == 5, "a request is made again with other keys only"
    await origin.aclose()


@BOTH_ENGINES
async def test_keys_that_are_all_refused_end_in_an_error_after_one_more_try(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    counter = write_program(home, [FIRST, SECOND, THIRD])
    proxy.requests_left = {FIRST: 0, SECOND: 0, THIRD: 0}
    origin = opened(uri, proxy, engine)
    for _ in range(3):
        with pytest.raises(OriginDenied, match="ExpiredToken"):
            await read(origin, uri)
    assert counter.read_text() == "xx", "and not for every request while the store refuses all"
    assert sum(proxy.refused.values()) == 4
    await origin.aclose()


@BOTH_ENGINES
async def test_keys_from_the_options_that_ended_are_an_error_at_once_that_says_what_to_do(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    write_file(home, SECOND)
    proxy.requests_left[FIRST] = 1
    origin = opened(uri, proxy, engine, key=FIRST, secret=KEYS[FIRST])
    assert await read(origin, uri) == b"body"
    with pytest.raises(OriginDenied, match=r"ExpiredToken.*pass new key, secret and token in storage_options.*profile"):
        await read(origin, uri)
    assert (proxy.refused[FIRST], proxy.seen[SECOND]) == (1, 0)
    await origin.aclose()


@BOTH_ENGINES
async def test_a_right_that_is_missing_is_no_matter_of_renewal(
    home: Path, proxy: ExpiringProxy, uri: str, engine: str
) -> None:
    counter = write_program(home, [FIRST, SECOND])
    proxy.requests_left[FIRST] = 0
    proxy.refusal = Fault(action="status", status=403, code="AccessDenied")
    origin = opened(uri, proxy, engine)
    with pytest.raises(OriginDenied, match="403 AccessDenied"):
        await read(origin, uri)
    assert counter.read_text() == "x"
    await origin.aclose()
