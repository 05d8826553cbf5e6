"""Credentials that a store refuses although it took them before: asked for anew, once, and the request made again.

The chain's answer says when credentials end, and they are renewed before that. A store may see it otherwise: a session
was revoked, a file with keys was replaced, a program gave no time, a clock is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheloader.errors import OriginError
    from cacheloader.origin.aws_credentials import AwsChain

# Source: Amazon S3 and AWS STS error code lists. The last two are what replaced keys are called.
_ENDED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"}
)

_STATIC = (
    "these credentials were given as they are and cannot be renewed here: pass new key, secret and token in"
    " storage_options, or leave them out for a profile (AWS_PROFILE) whose credentials are renewed"
)
_SAME = (
    "the credential chain was asked again and gives no others: renew them (aws sso login, or what fills the profile),"
    " and start the job again if they are variables of its environment"
)


class Refusal(Exception):
    """A store's answer that other credentials may change; never leaves the origin.

    Args:
        error: What the user is told if they do not.
    """

    def __init__(self, error: OriginError) -> None:
        super().__init__(error.message)
        self.error = error


def is_refusal(status: int, code: str) -> bool:
    """Whether an answer may mean that credentials have ended. One to a HEAD has no body, and so no code."""
    return code in _ENDED or (not code and status in {400, 401, 403})


def way_out(code: str, chain: AwsChain | None) -> str:
    """What to do about credentials that have ended, "" if ``code`` does not say that they have.

    Args:
        code: The store's own code.
        chain: What gave the credentials, ``None`` if the user did.
    """
    if code not in _ENDED:
        return ""
    return _STATIC if chain is None else _SAME
