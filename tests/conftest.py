"""Real servers, one of each a session, and a prefix of its own for each test."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.counting_proxy import CountingProxy
from tests.support.nginx import NginxServer
from tests.support.seaweedfs import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes, to be made or to run, is the machine's business; a test that hangs has pytest's own limit.
settings.register_profile(
    "cacheloader", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples in every run: what a chance one would find is no fault of the change that is being checked.
settings.register_profile("ci", parent=settings.get_profile("cacheloader"), derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "cacheloader"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A SeaweedFS that serves S3."""
    server = SeaweedServer(tmp_path_factory.mktemp("seaweedfs"))
    server.start(timeout_s=100)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3(s3_server: SeaweedServer) -> Any:
    """A boto3 client of ``s3_server``."""
    return s3_server.client()


@pytest.fixture(scope="session")
def bucket(s3: Any) -> str:
    """A bucket that exists."""
    s3.create_bucket(Bucket="test-data")
    return "test-data"


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses, ends in ``/``."""
    return f"test-{uuid.uuid4().hex}/"


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxServer]:
    """An nginx that serves the folder ``nginx.root``."""
    server = NginxServer(tmp_path_factory.mktemp("nginx"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_proxy(s3_server: SeaweedServer) -> Iterator[CountingProxy]:
    """A counting, breakable proxy in front of ``s3_server``; use ``storage_options(s3_proxy.url)``."""
    proxy = CountingProxy(s3_server.port).start()
    yield proxy
    proxy.stop()
