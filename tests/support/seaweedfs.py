"""The demo's S3 server, for tests."""

from __future__ import annotations

from typing import Any

from cacheloader.demo import seaweedfs
from cacheloader.demo.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, free_ports, storage_options

__all__ = ["ACCESS_KEY", "REGION", "SECRET_KEY", "SeaweedServer", "free_ports", "storage_options"]


class SeaweedServer(seaweedfs.SeaweedServer):
    """One `weed server`, addressed through boto3."""

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
                connect_timeout=5, read_timeout=30, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )
