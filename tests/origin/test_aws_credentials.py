"""The credential chain, with real files, real processes and a real bucket behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from botocore.session import Session as BotocoreSession

from cacheloader.errors import OriginDenied
from cacheloader.keys import ByteRange
from cacheloader.origin import aws_credentials
from cacheloader.origin.aws_credentials import AwsChain, AwsKey
from cacheloader.origin.open import open_origin
from cacheloader.origin.retry import Backoff
from cacheloader.origin.transfer import TransferLimits, with_retries
from tests.support.seaweedfs import ACCESS_KEY, SECRET_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.seaweedfs import SeaweedServer

CHAIN_DEADLINE_S = aws_credentials.DEADLINE_S


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without any credentials, whose instance metadata nobody serves.

    The chain may take its time: a process that imports botocore needs seconds on a busy machine.
    """
    monkeypatch.setattr(aws_credentials, "DEADLINE_S", 60.0)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**kept, "HOME": str(tmp_path), "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def num_connections(server: socket.socket) -> int:
    """How often somebody has connected."""
    num_taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            num_taken += 1
    return num_taken


def write_profile(home: Path, text: str) -> None:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(text)


def write_process(home: Path, lifetime: timedelta) -> Path:
    """A profile whose credentials come from a program that says how often it ran; returns the file where it counts."""
    counter = home / "calls"
    expires = (datetime.now(UTC) + lifetime).isoformat()
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Expiration": expires}
    program = home / "program.py"
    program.write_text(f"open({str(counter)!r}, 'a').write('x')\nprint({json.dumps(answer)!r})\n")
    write_profile(home, f"[profile program]\ncredential_process = {sys.executable} {program}\nregion = us-east-1\n")
    return counter


async def test_keys_of_the_environment_are_found(environment: dict[str, str]):
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}
    chain = AwsChain({**environment, **variables}, profile="", uri="s3://b/")
    assert await chain.key() == AwsKey(key="a", secret="b", token="c")


async def test_keys_region_and_endpoint_of_a_profile_are_found(environment: dict[str, str], tmp_path: Path):
    write_profile(
        tmp_path,
        "[profile mine]\naws_access_key_id = a\naws_secret_access_key = b\nregion = eu-west-1\nendpoint_url = http://h\n",
    )
    for chain in (
        AwsChain(environment, profile="mine", uri="s3://b/"),
        AwsChain({**environment, "AWS_PROFILE": "mine"}, profile="", uri="s3://b/"),
    ):
        answer = await chain.ask()
        assert answer.key == AwsKey(key="a", secret="b")
        assert (answer.region, answer.endpoint_url) == ("eu-west-1", "http://h")


async def test_an_unknown_profile_is_named(environment: dict[str, str]):
    chain = AwsChain(environment, profile="nobody", uri="s3://b/")
    with pytest.raises(OriginDenied, match=r"credentials for s3://b/ failed: The config profile \(nobody\)"):
        await chain.key()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_missing_credentials_are_reported_within_ten_seconds_even_if_the_instance_is_silent(
    environment: dict[str, str], silent_server: socket.socket, engine: str, monkeypatch: pytest.MonkeyPatch
):
    """Counted, not timed: how often the instance is asked, and how long it is waited for each time."""
    monkeypatch.setattr(os, "environ", environment)
    client = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{silent_server.getsockname()[1]}"}
    origin = open_origin("s3://bucket/", environment=client, engine=engine)
    with pytest.raises(OriginDenied, match=r"no AWS credentials .*; give key and secret .*AWS_PROFILE.* anon=True"):
        await origin.stat("s3://bucket/key")
    patience_s = BotocoreSession().get_config_variable("metadata_service_timeout")
    assert 0 < num_connections(silent_server) * patience_s <= 3
    assert CHAIN_DEADLINE_S < 10, "a chain that takes longer for another reason is ended then"
    await origin.aclose()


async def test_a_chain_that_hangs_is_ended_at_its_deadline(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(aws_credentials, "DEADLINE_S", 1.5)
    write_profile(tmp_path, "[default]\ncredential_process = sleep 600\n")
    with pytest.raises(OriginDenied, match=r"chain gave no answer in 1\.5 s; give key and secret"):
        await AwsChain(environment, profile="", uri="s3://b/").key()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_a_chain_that_hangs_longer_than_one_try_is_still_reported_as_what_it_is(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
):
    monkeypatch.setattr(aws_credentials, "DEADLINE_S", 1.5)
    monkeypatch.setattr(os, "environ", environment)
    write_profile(tmp_path, "[default]\ncredential_process = sleep 600\n")
    origin = open_origin("s3://bucket/", environment={}, engine=engine)
    limits = TransferLimits(timeout_floor_s=1.0, deadline_s=60.0, backoff=Backoff(first_s=0.01))
    with pytest.raises(OriginDenied, match=r"chain gave no answer in 1\.5 s; give key and secret"):
        await with_retries(
            lambda: origin.stat("s3://bucket/key"), action="describing", uri="s3://bucket/key", limits=limits
        )
    await origin.aclose()


async def test_credentials_are_asked_for_once_while_they_hold(environment: dict[str, str], tmp_path: Path):
    counter = write_process(tmp_path, timedelta(hours=1))
    chain = AwsChain(environment, profile="program", uri="s3://b/")
    assert await chain.key() == await chain.key()
    assert counter.read_text() == "x"


async def test_credentials_that_end_soon_are_asked_for_again(environment: dict[str, str], tmp_path: Path):
    counter = write_process(tmp_path, timedelta(minutes=4))
    chain = AwsChain(environment, profile="program", uri="s3://b/")
    await chain.key()
    first = len(counter.read_text())
    await chain.key()
    assert len(counter.read_text()) > first


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("minutes", [4, 60])
async def test_both_engines_read_with_keys_that_expire_and_renew_them(
    environment: dict[str, str],
    tmp_path: Path,
    s3_server: SeaweedServer,
    s3: Any,
    bucket: str,
    prefix: str,
    engine: str,
    minutes: int,
    monkeypatch: pytest.MonkeyPatch,
):
    counter = write_process(tmp_path, timedelta(minutes=minutes))
    s3.put_object(Bucket=bucket, Key=f"{prefix}object", Body=b"body")
    uri = f"s3://{bucket}/{prefix}object"
    monkeypatch.setattr(os, "environ", environment)
    client = {"AWS_PROFILE": "program", "AWS_ENDPOINT_URL": s3_server.endpoint_url}
    origin = open_origin(uri, environment=client, engine=engine)
    for _ in range(3):
        assert bytes(await origin.read_range(uri, ByteRange(start=0, stop=4), version="")) == b"body"
    await origin.aclose()
    assert len(counter.read_text()) == 1 if minutes == 60 else len(counter.read_text()) > 1


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_a_job_without_credentials_does_not_read_with_those_of_the_daemon(
    environment: dict[str, str],
    s3_server: SeaweedServer,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
):
    daemon = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    monkeypatch.setattr(os, "environ", {**environment, **daemon})
    client = {"AWS_ENDPOINT_URL": s3_server.endpoint_url, "AWS_EC2_METADATA_DISABLED": "true"}
    origin = open_origin(f"s3://{bucket}/", environment=client, engine=engine)
    with pytest.raises(OriginDenied, match="no AWS credentials"):
        await origin.stat(f"s3://{bucket}/key")
    await origin.aclose()


def test_a_secret_stays_out_of_the_repr():
    assert "hidden" not in repr(AwsKey(key="k", secret="hidden", token="hidden"))


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_the_endpoint_of_a_profile_holds_also_for_keys_from_the_options(
    environment: dict[str, str],
    tmp_path: Path,
    s3_server: SeaweedServer,
    s3: Any,
    bucket: str,
    prefix: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "environ", environment)
    s3.put_object(Bucket=bucket, Key=f"{prefix}x", Body=b"12345")
    write_profile(tmp_path, f"[default]\nendpoint_url = {s3_server.endpoint_url}\n")
    keys = {"key": ACCESS_KEY, "secret": SECRET_KEY}
    origin = open_origin(f"s3://{bucket}/", storage_options=keys, environment={}, engine=engine)
    async with asyncio.timeout(60):
        assert (await origin.stat(f"s3://{bucket}/{prefix}x")).size_bytes == 5
    await origin.aclose()


async def test_the_chain_imports_nothing_from_the_working_directory(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    variables = {**environment, "AWS_ACCESS_KEY_ID": "an-id", "AWS_SECRET_ACCESS_KEY": "a-secret"}
    assert (await AwsChain(variables, profile="", uri="s3://b/").key()).key == "an-id"
