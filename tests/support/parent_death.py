"""Server processes that end with the test process, even if that is killed."""

from __future__ import annotations

from cacheloader.demo.seaweedfs import die_with_parent

__all__ = ["die_with_parent"]
