"""Every error a user can meet, named by who has to act.

::

    CacheloaderError
    ├── ConfigError            the caller passed something that cannot work (also a ValueError)
    │   ├── QuotaTooSmall      the cache cannot hold what one window needs
    │   └── StateMismatch      a saved position does not belong to this data set or order
    ├── OriginError            the remote store said no, or said nothing
    │   ├── OriginNotFound     no such object, bucket or path
    │   ├── OriginDenied       missing, wrong or expired credentials
    │   ├── OriginThrottled    slow down (429, 503 SlowDown)
    │   ├── OriginChanged      the object is not the version that the manifest names
    │   ├── OriginTimeout      no answer within the deadline
    │   ├── OriginShortBody    fewer or more bytes than the range that was asked for
    │   └── OriginUnavailable  5xx, refused or broken connections, DNS
    ├── DatasetError           the data is there and is not what it should be
    │   ├── EmptyDataset       the URLs match no shard
    │   ├── CorruptShard       a shard cannot be parsed
    │   └── BadSample          the user's transform failed on more samples than allowed
    ├── CheckpointError        a checkpoint cannot be written, read or removed
    │   ├── SaveFailed         a save, perhaps in the background, did not end in a commit
    │   └── NoValidCheckpoint  there are checkpoints, and none of them verifies
    ├── WorkerLost             a worker process of the loader has died (also a RuntimeError)
    └── DaemonError            the node daemon
        ├── DaemonUnavailable  it cannot be reached or started
        ├── CacheUnusable      its cache directory cannot be used
        ├── DeadlineExceeded   it did not answer in time
        └── ProtocolError      the two sides do not understand each other

Each error is built from one message, so that it survives pickling, torch's re-raise in the main process and the
wire. A message is one sentence: what failed, the value seen, the rule, the way out. It travels to logs, to a status and
to other machines, so user names and signatures in URLs are masked here, where every error comes by.
"""

from __future__ import annotations

import re

# A user name ends at the last "@" before the path: a password may hold one. A question mark without an "=" is part of a
# key or of a sentence.
_URL_SECRETS = re.compile(r"(?P<head>\w://)[^/\s\"']+@|(?P<query>\?)(?=[^\s\"'?]*=)(?:[^\s\"'<>),;:.]|[,;:.](?=\S))*")


def masked_urls(text: str) -> str:
    """``text`` without user names, passwords and query strings of URLs; what is masked already stays as it is."""
    return _URL_SECRETS.sub(lambda match: f"{match['head']}***@" if match["head"] else "?***", text)


class CacheloaderError(Exception):
    """Root of all errors raised on purpose by cacheloader.

    Args:
        message: What failed, the value seen, the rule and the way out.
        uri: The object or path it is about, empty where there is none; masked like the message.
    """

    def __init__(self, message: str, *, uri: str = "") -> None:
        super().__init__(masked_urls(message))
        self.uri = masked_urls(uri)

    @property
    def message(self) -> str:
        """The text without the type."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.uri))


def _rebuild(kind: type[CacheloaderError], message: str, uri: str) -> CacheloaderError:
    return kind(message, uri=uri)


class ConfigError(CacheloaderError, ValueError):
    """An option, or a combination of options, that cannot work."""


class QuotaTooSmall(ConfigError):
    """The cache cannot hold the shards that one window of the order needs at once."""


class StateMismatch(ConfigError):
    """A saved position does not belong to this data set or this order."""


class OriginError(CacheloaderError):
    """The remote store failed; ``retryable`` tells whether asking again can help."""

    retryable = False


class OriginNotFound(OriginError):
    """No such object, bucket or path."""


class OriginDenied(OriginError):
    """Missing, wrong or expired credentials, or no permission."""


class OriginThrottled(OriginError):
    """The store asked to slow down."""

    retryable = True


class OriginChanged(OriginError):
    """The object is not the version that the manifest names."""


class OriginTimeout(OriginError):
    """No answer within the deadline."""

    retryable = True


class OriginShortBody(OriginError):
    """The body is not as long as the range that was asked for."""

    retryable = True


class OriginUnavailable(OriginError):
    """A server error, a refused or broken connection, or a name that does not resolve."""

    retryable = True


class DatasetError(CacheloaderError):
    """The data is there and is not what it should be."""


class EmptyDataset(DatasetError):
    """The URLs match no shard, or the shards hold no sample."""


class CorruptShard(DatasetError):
    """A shard cannot be parsed as its format."""


class BadSample(DatasetError):
    """The user's transform failed on more samples than may be skipped."""


class CheckpointError(CacheloaderError):
    """A checkpoint cannot be written, read or removed."""


class SaveFailed(CheckpointError):
    """A save did not end in a commit."""


class NoValidCheckpoint(CheckpointError):
    """There are checkpoints, and none of them verifies."""


class WorkerLost(CacheloaderError, RuntimeError):
    """A worker process of the loader has died."""


class DaemonError(CacheloaderError):
    """The node daemon failed."""


class DaemonUnavailable(DaemonError):
    """The daemon cannot be reached or started."""


class CacheUnusable(DaemonError):
    """The cache directory cannot be used."""


class DeadlineExceeded(DaemonError):
    """The daemon did not answer in time."""


class ProtocolError(DaemonError):
    """The two sides of a connection do not understand each other."""


def _tree(kind: type[CacheloaderError]) -> dict[str, type[CacheloaderError]]:
    kinds = {kind.__name__: kind}
    for child in kind.__subclasses__():
        kinds.update(_tree(child))
    return kinds


def from_wire(kind: str, message: str, uri: str = "") -> CacheloaderError:
    """The error a peer reported, as the same class on this side.

    Args:
        kind: Class name sent by the peer; an unknown one (a newer peer) becomes a ``DaemonError``.
        message: The peer's message, unchanged.
        uri: The object it is about.
    """
    return _tree(CacheloaderError).get(kind, DaemonError)(message, uri=uri)
