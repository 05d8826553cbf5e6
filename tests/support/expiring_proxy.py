"""A proxy in front of an S3 server whose keys end after some requests, as the sessions of a cloud do."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.support.counting_proxy import CountingProxy, Fault

if TYPE_CHECKING:
    from tests.support.http_relay import Head

_CREDENTIAL = re.compile(r"Credential=([^/]+)/")


class ExpiringProxy(CountingProxy):
    """As ``CountingProxy``; set attributes before requests come.

    Attributes:
        requests_left: Access key to how many more requests it is good for; a key that is not named does not end.
        refusal: What is answered after that.
        refused: Requests that were refused, by access key.
        seen: All requests, by access key.
    """

    def __init__(self, upstream_port: int) -> None:
        super().__init__(upstream_port)
        self.requests_left: dict[str, int] = {}
        self.refusal = Fault(action="status", status=400, code="ExpiredToken")
        self.refused: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def _refusal(self, request: Head) -> Fault | None:
        match = _CREDENTIAL.search(request.get("authorization"))
        key = match[1] if match else ""
        self.seen[key] += 1
        left = self.requests_left.get(key)
        if left is None:
            return None
        if left > 0:
            self.requests_left[key] = left - 1
            return None
        self.refused[key] += 1
        return self.refusal
