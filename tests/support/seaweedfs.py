"""The demo's S3 server, for tests."""

from __future__ import annotations

import os
from typing import Any

from cacheloader.demo import seaweedfs
from cacheloader.demo.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, free_ports, storage_options

__all__ = ["ACCESS_KEY", "KEYS", "REGION", "SECRET_KEY", "SeaweedServer", "free_ports", "storage_options"]


# Workers of pytest-xdist, and what they start, look among ports of their own: one that is free here is not taken by
# another worker before it is used.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
seaweedfs._PORTS = seaweedfs._PORTS[_WORKER % _NUM_WORKERS :: _NUM_WORKERS]

KEYS = {ACCESS_KEY: SECRET_KEY, "AKTEST02": "SKTEST-second-0123", "AKTEST03": "SKTEST-third-01234"}
"""All that open the test server, the demo's first."""


class SeaweedServer(seaweedfs.SeaweedServer):
    """One `weed server`, addressed through boto3, that knows more than one key of the same user."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (user,) = self.identities
        keys = [{"accessKey": key, "secretKey": secret} for key, secret in KEYS.items()]
        self.identities = [{**user, "credentials": keys}]

    def client(self, endpoint_url: str = "") -> Any:
        """A boto3 client that may do everything."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=endpoint_url or self.endpoint_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name=REGION,
            config=Config(
                connect_timeout=30, read_timeout=60, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )
