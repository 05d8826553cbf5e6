"""Every message of the protocol. One connection is one session and reads at most one data set.

A client opens with ``Hello`` and the daemon answers ``Welcome`` or ``Failed``. After that the client sends requests,
each with an ``id`` of its own choice; the daemon answers each id with its reply, in any order, possibly after
several ``Progress``. ``Advance``, ``Release``, ``Report``, ``WatchRun``, ``Beat`` and ``EndRun`` have no
reply.

Bulk data never travels inside a message: a message says that a descriptor comes with it ("+ fd").
"""

from __future__ import annotations

import msgspec

VERSION = 2
"""Raised with each incompatible change. A side speaks this version and ``OLDEST_VERSION`` and all between."""

OLDEST_VERSION = 1

SIGNS_OF_LIFE = 2
"""The version from which on a peer says something at least every ``HEARTBEAT_S`` seconds while a request waits, so that
a long silence means that it hangs; and from which on it takes the newer fields of ``Report``."""

HEARTBEAT_S = 2.0


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: tagged by class name, unknown fields refused."""


class Hello(_Message, frozen=True, kw_only=True):
    """First message of a client.

    Attributes:
        oldest: Oldest protocol version that the client speaks.
        newest: Newest protocol version that the client speaks.
        client: Free text for logs, such as ``"cacheloader 0.1.0 python 3.11"``.
    """

    oldest: int
    newest: int
    client: str = ""


class OpenDataset(_Message, frozen=True, kw_only=True):
    """Resolve a data set: list, stat, count. + fd: sealed memory file with an encoded ``DatasetSpec``.

    Attributes:
        digest: Digest of the manifest the client already knows, "" at the first opening. A daemon that still has it
            does not ask the origin again; one that has not resolves again and fails if the digest differs.
    """

    id: int
    digest: str = ""


class FollowPlan(_Message, frozen=True, kw_only=True):
    """Register the session's coming accesses, replacing an earlier plan. + fd: sealed memory file with the arrays.

    The arrays lie one behind the other, little endian, each ``num_accesses`` long: ``first_clock`` int64 (sorted),
    ``stop_clock`` int64, ``shard`` int32. Access ``a`` needs shard ``shard[a]`` (index in the manifest) during
    ``[first_clock, stop_clock)``. The clock counts rows of the order over all epochs.

    Attributes:
        num_accesses: Length of each array.
        clock: Where the session stands.
    """

    id: int
    num_accesses: int
    clock: int


class Advance(_Message, frozen=True, kw_only=True):
    """The session has finished with every row before ``clock``. No reply."""

    clock: int


class Acquire(_Message, frozen=True, kw_only=True):
    """Ask for a lease of a shard of the open data set.

    Attributes:
        shard: Index in the manifest.
    """

    id: int
    shard: int


class Release(_Message, frozen=True, kw_only=True):
    """Give back one lease of a shard (leases are counted per shard). No reply."""

    shard: int


class Report(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """What the client saw since the last report. No reply.

    Attributes:
        fetch_seconds: Waiting time inside ``next(loader)``, one number a batch.
        samples: Samples delivered.
        fallbacks: Times that a session went away from this daemon, which did not answer, and read the origin itself.
        away_seconds: For how long.
    """

    fetch_seconds: list[float]
    samples: int
    fallbacks: int = 0
    away_seconds: float = 0.0


class WatchRun(_Message, frozen=True, kw_only=True):
    """One rank of a training run asks to be watched. + fd: its file for what the daemon sees, open for appending.

    No reply. From here on the daemon writes a heartbeat into the file every few seconds, and at the end of the
    connection, if no ``EndRun`` came, that the process has gone. So a rank that is killed, or hangs, leaves an account.

    Attributes:
        run: Name of the run.
        attempt: Name of the launch.
        rank: Which.
        world: Ranks of the attempt.
    """

    run: str
    attempt: str
    rank: int
    world: int


class Beat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """What a watched rank has done since its last beat. No reply.

    Attributes:
        step: Last step that it has completed.
        steps: Steps since.
        step_seconds: How long they took, together.
        exposed_seconds: How long its device waited for data in them.
        tokens: Tokens of them.
        kept_tokens: Tokens that a commit has made safe since.
        committed_step: The last step that is safe, -1 if unknown.
    """

    step: int
    steps: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    tokens: int = 0
    kept_tokens: int = 0
    committed_step: int = -1


class EndRun(_Message, frozen=True, kw_only=True):
    """A watched rank ends on its own accord, well or with an error, and has written down why. No reply."""


class GetStatus(_Message, frozen=True, kw_only=True):
    """Ask for the daemon's statistics."""

    id: int


class Stop(_Message, frozen=True, kw_only=True):
    """Ask a private daemon to finish and leave; a shared one refuses."""

    id: int


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to ``Hello``.

    Attributes:
        version: The version that both sides use from now on.
        daemon: Free text for logs.
        pid: The daemon's process.
        quota_bytes: What its cache may hold.
    """

    version: int
    daemon: str
    pid: int
    quota_bytes: int


class Progress(_Message, frozen=True, kw_only=True):
    """A request is being worked on; told at least every ``HEARTBEAT_S`` as long as the client reads.

    Attributes:
        stage: What is being done, such as ``"listing"`` or ``"counting samples"``.
        done: Units finished.
        total: Units in all, 0 while unknown.
    """

    id: int
    stage: str
    done: int
    total: int


class DatasetReady(_Message, frozen=True, kw_only=True):
    """Answer to ``OpenDataset``. + fd: read-only descriptor of the encoded manifest.

    Attributes:
        digest: The manifest's digest.
    """

    id: int
    digest: str


class Accepted(_Message, frozen=True, kw_only=True):
    """Answer to a request that has no other result."""

    id: int


class Leased(_Message, frozen=True, kw_only=True):
    """Answer to ``Acquire``, first half. + fd: fresh read-only descriptor of the shard's bytes.

    Attributes:
        size_bytes: Length of the shard.
        source: ``"nvme"`` (was in the cache), ``"origin"`` (had to be waited for) or ``"memory"`` (not cached).
    """

    id: int
    size_bytes: int
    source: str


class LeasedIndex(_Message, frozen=True, kw_only=True):
    """Answer to ``Acquire``, second half, always behind ``Leased``. + fd: read-only descriptor of the sample index.

    Attributes:
        size_bytes: Length of the index.
    """

    id: int
    size_bytes: int


class Status(_Message, frozen=True, kw_only=True):
    """Answer to ``GetStatus``. + fd: sealed memory file with a JSON object (statistics, sessions)."""

    id: int


class Failed(_Message, frozen=True, kw_only=True):
    """Answer to any request that failed.

    Attributes:
        id: The request; 0 if the connection itself is at fault and will be closed.
        kind: Class name in ``cacheloader.errors``.
        message: One sentence for a person.
        uri: The object it is about, "" if none.
    """

    id: int
    kind: str
    message: str
    uri: str = ""


Request = (
    Hello
    | OpenDataset
    | FollowPlan
    | Advance
    | Acquire
    | Release
    | Report
    | WatchRun
    | Beat
    | EndRun
    | GetStatus
    | Stop
)
Reply = Welcome | Progress | DatasetReady | Accepted | Leased | LeasedIndex | Status | Failed


class DatasetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user asked to read, before the origin was asked.

    Attributes:
        urls: URLs, paths, brace patterns, globs or directories, in the user's order.
        format: Name of a shard format, "" to detect it.
        storage_options: Options of the origin, named as fsspec names them.
        environment: The client's own variables that steer a store's credential chain (``AWS_*``, ``GOOGLE_*``,
            ``AZURE_*``), sent to a private daemon only, which may have been started by another job.
    """

    urls: list[str]
    format: str = ""
    storage_options: dict[str, object] = {}
    environment: dict[str, str] = {}
