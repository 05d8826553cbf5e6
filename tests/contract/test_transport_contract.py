"""What every transport promises, on each of them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cacheloader.errors import ConfigError, CorruptShard, OriginNotFound, StateMismatch
from cacheloader.formats.registry import named
from cacheloader.transport.base import AccessPlan
from cacheloader.transport.open import open_transport
from tests.contract.transports import NUM_SHARDS, SAMPLES_PER_SHARD, Backend, running, sample_text, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheloader.config import TransportOptions
    from cacheloader.manifest.record import Manifest
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader.transport.base import Lease, Transport


@pytest.fixture(scope="module", params=["memory", "direct", "embedded", "shared"])
def running_backend(request, tmp_path_factory) -> Iterator[Backend]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as backend:
        yield backend


@pytest.fixture
def backend(running_backend) -> Iterator[Backend]:
    yield running_backend
    running_backend.close()


def opened(backend: Backend, name: str = "good/") -> tuple[Transport, Manifest]:
    session = backend.session()
    return session, session.open_dataset(backend.spec(name))


def check(lease: Lease, shard: int) -> None:
    content = tar_of(shard)
    assert lease.size_bytes == len(content)
    assert lease.read(0, lease.size_bytes) == content
    assert lease.read(17, 1000) == content[17:1000]
    assert lease.read_each([17, 0], [1000, 512]) == [content[17:1000], content[:512]]
    assert lease.source in {"nvme", "origin", "memory"}
    reader = named("webdataset").open(lease, lease.index, uri="contract")
    samples = reader.read(np.arange(reader.num_samples))
    assert [sample["txt"] for sample in samples] == [sample_text(shard, i) for i in range(SAMPLES_PER_SHARD)]


def plan(shards: list[int], *, rows: int = 10) -> AccessPlan:
    first = np.arange(len(shards), dtype=np.int64) * rows
    return AccessPlan(first_clock=first, stop_clock=first + rows, shard=np.asarray(shards, dtype=np.int32), clock=0)


def test_opening_gives_the_shards_in_order_with_sizes_versions_and_counts(backend):
    _, manifest = opened(backend)
    assert len(manifest) == NUM_SHARDS
    for shard in range(NUM_SHARDS):
        info = manifest.shard(shard)
        assert info.uri.endswith(f"/good/{shard}.tar")
        assert info.size_bytes == len(tar_of(shard))
        assert info.num_samples == SAMPLES_PER_SHARD
        assert info.version
    assert manifest.format == "webdataset"


def test_opening_by_digest_gives_the_same_manifest(backend):
    _, manifest = opened(backend)
    again = backend.session().open_dataset(backend.spec(), digest=manifest.digest)
    assert bytes(again.to_bytes()) == bytes(manifest.to_bytes())


def test_opening_by_the_digest_of_something_else_is_a_mismatch(backend):
    with pytest.raises(StateMismatch, match="0" * 32):
        backend.session().open_dataset(backend.spec(), digest="0" * 32)


def test_progress_is_told_as_stage_and_numbers(backend):
    seen = []
    backend.session().open_dataset(backend.spec("few/"), progress=lambda *news: seen.append(news))
    for stage, done, total in seen:
        assert isinstance(stage, str)
        assert total == 0 or 0 <= done <= total


def test_every_shard_reads_as_its_source_in_any_order(backend):
    session, _ = opened(backend)
    for shard in (3, 0, 4, 1, 2, 0):
        lease = session.acquire(shard)
        check(lease, shard)
        lease.release()


def test_leases_of_one_shard_are_independent(backend):
    session, _ = opened(backend)
    first, second = session.acquire(1), session.acquire(1)
    first.release()
    check(second, 1)
    third = session.acquire(1)
    second.release()
    check(third, 1)


def test_all_shards_can_be_leased_at_once(backend):
    session, _ = opened(backend)
    leases = [session.acquire(shard) for shard in range(NUM_SHARDS)]
    for shard, lease in enumerate(leases):
        check(lease, shard)


def test_releasing_and_closing_again_does_nothing(backend):
    session, _ = opened(backend)
    lease = session.acquire(0)
    lease.release()
    lease.release()
    with pytest.raises(OSError, match="released"):
        lease.read(0, 1)
    held = session.acquire(1)
    session.close()
    session.close()
    with pytest.raises(OSError, match="released"):
        held.read(0, 1)
    held.release()
    with pytest.raises(ConfigError, match="closed"):
        session.acquire(0)


def test_session_that_is_closed_does_not_end_another(backend):
    first, _ = opened(backend)
    second, _ = opened(backend)
    lease = second.acquire(2)
    first.close()
    check(lease, 2)
    check(second.acquire(3), 3)


def test_two_sessions_read_two_data_sets_at_once(backend):
    good, _ = opened(backend)
    few, manifest = opened(backend, "few/")
    assert len(manifest) == NUM_SHARDS - 3
    for shard in range(len(manifest)):
        check(few.acquire(shard), shard + 3)
        check(good.acquire(shard), shard)


def test_plan_and_progress_are_taken(backend):
    session, _ = opened(backend)
    order = [4, 2, 0, 1, 3, 4]
    session.follow(plan(order))
    for step, shard in enumerate(order):
        lease = session.acquire(shard)
        check(lease, shard)
        session.advance(step * 10 + 5)
        lease.release()
        session.advance(step * 10 + 10)
    session.follow(plan([]))
    session.advance(10**9)
    check(session.acquire(0), 0)


def test_missing_data_is_an_error_that_names_it(backend):
    session = backend.session()
    with pytest.raises(OriginNotFound, match=r"nothing/here\.tar"):
        session.open_dataset(backend.spec("nothing/here.tar"))
    session.open_dataset(backend.spec())
    check(session.acquire(0), 0)


def test_truncated_shard_is_an_error_that_names_it(backend):
    session = backend.session()
    with pytest.raises(CorruptShard, match=r"cut\.tar"):
        session.open_dataset(backend.spec("cut/"))


def test_after_a_fork_both_processes_read_on(backend):
    session, _ = opened(backend)
    session.follow(plan([0, 1, 2]))
    lease = session.acquire(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for shard in (2, 0, 1):
                check(session.acquire(shard), shard)
            session.advance(5)
            lease.release()
            session.close()
            code = 0
        finally:
            os._exit(code)
    check(session.acquire(1), 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    check(lease, 0)
    session.advance(7)
    check(session.acquire(2), 2)


def _read_elsewhere(options: TransportOptions, spec: DatasetSpec, digest: str) -> None:
    session = open_transport(options)
    session.open_dataset(spec, digest=digest)
    for shard in range(NUM_SHARDS):
        check(session.acquire(shard), shard)
    session.close()


@pytest.mark.timeout(300)  # a python starts, and on a busy machine takes its time
def test_options_take_the_session_to_a_spawned_process(backend):
    if backend.options is None:
        pytest.skip("shards in memory stay in their process")
    _, manifest = opened(backend)
    assert pickle.loads(pickle.dumps(backend.options)) == backend.options
    process = multiprocessing.get_context("spawn").Process(
        target=_read_elsewhere, args=(backend.options, backend.spec(), manifest.digest)
    )
    process.start()
    process.join(200)
    assert process.exitcode == 0
